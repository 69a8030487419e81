// The completions of a prompt with their scores and advantages, from the sampler to the packing of
// an update.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "data/example.h"
#include "rl/grpo_config.h"
#include "rl/reward.h"

namespace cohort {

struct ScoredCompletion : Trajectory {
  std::vector<double> rewards = {};  // one per RewardSet::names(); NaN: it does not apply
  double reward = kNotApplicable;    // their weighted sum; NaN: none applies
  // Why it has no score: the error of the environment, or of the first reward that has failed;
  // empty: neither has.
  std::string error = {};
  double advantage = 0;                      // with credit: turn the mean over the tokens
  std::vector<double> turn_advantages = {};  // with credit: turn, one per turn
  // Advantages by a function of the program, one per sampled token; `advantage` is their mean.
  std::vector<double> host_advantages = {};
  // The advantage by the rewards alone, before GDPO's standardisation, whitening, clipping and a KL
  // in the reward.
  double reward_advantage = 0;
};

// The return of each turn of a dialogue: R_k = sum over j >= k of discount^(j - k) r_j. r_j is the
// reward of turn j times the weight of the reward `environment`; the weighted sum of the
// completion's other rewards is added to that of the last turn. `names` and `weights`: those of
// the RewardSet. NaN for all turns of a completion without a reward.
std::vector<double> turn_returns(const ScoredCompletion& completion,
                                 std::span<const std::string> names,
                                 std::span<const double> weights, double discount);

// A prompt, and its position in the step over all ranks.
struct Group {
  int64_t index = 0;
  Example example;
  std::vector<ScoredCompletion> completions = {};
};

// Groups completions as Sampler::sample() returns them, with their scores. Those of `scores` may be
// missing.
std::vector<Group> group_completions(std::span<const Example> prompts,
                                     std::vector<Trajectory> completions,
                                     const RewardSet::Scores& scores = {});

// Success criterion for a correct completion, eval.correct: the reward at this position is at least
// `threshold`. -1: none is given.
struct SuccessCriterion {
  int64_t reward = -1;
  double threshold = 0;
};

// 1 if a group is solved (all completions that can be judged are correct), -1 if it has failed (all
// are wrong), else 0. Without a criterion: its rewards are equal and above 0, equal and at most 0,
// or they differ. nullopt: no completion can be judged.
std::optional<int> group_outcome(const Group& group, const SuccessCriterion& criterion);
// That by the rewards of a group, without a criterion.
std::optional<int> group_outcome(std::span<const double> rewards);

// Tokens of a completion that count in the loss: none without a reward, or if it is truncated and
// mask_truncated_completions leaves it out.
int64_t count_loss_tokens(const ScoredCompletion& completion, const GrpoConfig& config);

// True if a completion that has tokens in the loss has a reward_advantage, or one of a turn, other
// than 0.
bool has_signal(const Group& group, const GrpoConfig& config);

}  // namespace cohort
