// The numbers of a GRPO step, under TRL's names where they mean the same.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "data/data_config.h"
#include "rl/engine/rollout.h"
#include "rl/grpo.h"
#include "rl/reward.h"
#include "trainers/learner.h"
#include "trainers/metrics.h"

namespace cohort {

// The sections of a configuration that a GRPO step reads.
struct GrpoSections {
  const GrpoConfig& grpo;
  const BatchConfig& batch;
  const SamplingConfig& sampling;
  uint64_t seed = 0;
};

// Tokens of a completion that count in the loss: none without a reward, or if it is truncated and
// mask_truncated_completions leaves it out.
int64_t count_loss_tokens(const Trajectory& completion, double reward, const GrpoConfig& config);

// 1 if a group, elements `group` size to (`group` + 1) size - 1 of `rewards`, is solved (they are
// equal and above 0), -1 if it has failed (equal and at most 0), 0 if they differ. nullopt: it has
// no reward.
std::optional<int> group_outcome(std::span<const double> rewards, size_t group, int64_t size);

// The rounds of a step that replaced groups without a signal, and the groups that they replaced.
struct Refill {
  int64_t rounds = 0, prompts = 0;  // over all ranks
  Moments solved, failed;           // this rank's groups whose rewards are equal, above 0 or not
  // Counts a group (group_outcome()) if it has a reward.
  void add_group(std::span<const double> rewards, size_t group, int64_t size);
};

// Completions that one rank sampled in a step, with rewards and advantages.
struct ScoredRollouts {
  std::vector<Trajectory> trajectories;
  RewardSet::Scores scores;
  std::vector<double> advantages;  // one per completion
  Refill refill = {};
};

// Sums over the updates of a step.
struct UpdateSums {
  kernels::PolicyLossStats policy;  // over this rank's tokens
  double updates = 0, loss = 0, grad_norm = 0;
  double made = 0;             // updates whose gradient is not exactly 0
  double clipped = 0;          // updates whose gradient exceeded max_grad_norm
  double ratio_deviation = 0;  // max |ratio - 1| before the first update, before it was corrected
  Moments step_kl;             // KL(old policy, new policy), over this rank's measured tokens
  void add(const Learner::Update& update, const kernels::PolicyLossStats& stats);
};

// docs/grpo.md, section 9, documents the metrics. NaN: not measured.
MetricSums grpo_metrics(const ScoredRollouts& scored, const std::vector<std::string>& reward_names,
                        const UpdateSums& updates, const GrpoSections& config,
                        double learning_rate);
// Adds the numbers of dialogues: their turns and observed tokens, the fraction that max_turns has
// truncated, and how many an environment has failed.
void add_dialogue_metrics(MetricSums& out, std::span<const Trajectory> dialogues);
// Adds the engine's statistics since their last reset, `seconds` ago.
void add_rollout_metrics(MetricSums& out, const Engine& engine, double seconds);

}  // namespace cohort
