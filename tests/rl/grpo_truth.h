// Published numeric cases of GRPO systems (grpo_truth/cases.json in the data folder) and their
// checks. The table contains ids only; inputs and expected numbers are read from the file.
#pragma once

#include <vector>

#include "text/json.h"

namespace cohort::test {

enum class Coverage {
  kWhole,  // our functions give every expected number
  kPart,   // they give some; `how` states which, and what the check computes itself
  kNone    // no function gives them; `how` states why
};

struct TruthCase {
  const char* id;
  Coverage coverage;
  const char* how;
  void (*check)(const Json& truth);  // nullptr for kNone
};
const std::vector<TruthCase>& truth_table();

// ---- Checks: each takes one case of the file and reports by gtest expectations
// ------------------------------------------------------------------------------------------------

void check_kl(const Json& truth);
void check_kl_penalty(const Json& truth);
void check_kl_gradient(const Json& truth);
void check_clip(const Json& truth);
void check_dual_clip(const Json& truth);
void check_cispo(const Json& truth);
void check_rollout_weights(const Json& truth);
void check_given_weights(const Json& truth);
void check_sequence_ratio(const Json& truth);
void check_leave_one_out(const Json& truth);
void check_group_advantages(const Json& truth);
void check_group_advantages_without_floor(const Json& truth);
void check_equal_rewards(const Json& truth);
void check_masked_mean(const Json& truth);
void check_token_mean(const Json& truth);
void check_token_mean_of_ranks(const Json& truth);
void check_token_mean_of_micro_batches(const Json& truth);
void check_token_sum(const Json& truth);
void check_sequence_mean(const Json& truth);
void check_overlong(const Json& truth);
void check_overlong_added(const Json& truth);
void check_repetition(const Json& truth);
void check_cosine(const Json& truth);
void check_entropy_mask(const Json& truth);
void check_off_policy_mask(const Json& truth);
void check_nll(const Json& truth);

}  // namespace cohort::test
