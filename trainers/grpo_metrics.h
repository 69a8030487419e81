// The numbers of a GRPO step, under TRL's names where they mean the same.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "data/data_config.h"
#include "rl/engine/rollout.h"
#include "rl/group.h"
#include "trainers/balance.h"
#include "trainers/learner.h"
#include "trainers/metrics.h"

namespace cohort {

// The sections of a configuration that a GRPO step reads.
struct GrpoSections {
  const GrpoConfig& grpo;
  const BatchConfig& batch;
  const SamplingConfig& sampling;
  uint64_t seed = 0;
  SuccessCriterion criterion = {};
};

// Counts over groups of a rank.
struct GroupCounts {
  Moments solved, failed;  // by the criterion, of the groups that can be judged
  double tokens = 0;       // in prompts and completions
  // Dialogues that the environment has failed, and the first error.
  double failed_dialogues = 0;
  std::string first_error;
  void add(const Group& group, const SuccessCriterion& criterion);
};

// The groups that one rank has sampled in a step.
struct ScoredRollouts {
  std::vector<Group> groups;                   // by index
  std::map<std::string, int64_t> counts = {};  // RewardSet::Scores::counts, of all rounds
  // Rounds that replaced groups without a signal, and the prompts of all rounds, over all ranks.
  int64_t dynamic_sampling_rounds = 0, num_prompts = 0;
  GroupCounts replaced = {};  // the groups that they replaced
  // Counts over the groups of all rounds.
  GroupCounts count(const SuccessCriterion& criterion = {}) const;
};

// Sums over the updates of a step.
struct UpdateSums {
  kernels::PolicyLossStats policy;  // over this rank's tokens
  double made = 0;                  // updates whose gradient is not exactly 0
  double loss = 0, grad_norm = 0;   // sums over the updates made
  double clipped = 0;               // updates whose gradient exceeded max_grad_norm
  double ratio_deviation = 0;  // max |ratio - 1| before the first update, before it was corrected
  RankLoad load;               // the sum over the updates
  double tokens = 0, masked = 0;  // sums over the fields of PolicyUpdate
  Moments step_kl;                // KL(old policy, new policy), over this rank's measured tokens
  void add(const Learner::Update& update);
};

// docs/grpo.md, section 9, documents the metrics. NaN: not measured.
MetricSums grpo_metrics(const ScoredRollouts& scored, const std::vector<std::string>& reward_names,
                        const UpdateSums& updates, const GrpoSections& config,
                        double learning_rate);
// Adds the numbers of dialogues: their turns and observed tokens, the fraction that max_turns has
// truncated, and how many an environment has failed in all rounds.
void add_dialogue_metrics(MetricSums& out, const ScoredRollouts& dialogues);
// Adds the engine's statistics since their last reset, `seconds` ago.
void add_rollout_metrics(MetricSums& out, const Engine& engine, double seconds);

}  // namespace cohort
