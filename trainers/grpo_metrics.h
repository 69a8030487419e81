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

// Criterion of correct completions, eval.correct: the reward at this position is at least
// `threshold`. -1: none is given.
struct OutcomeCriterion {
  int64_t reward = -1;
  double threshold = 0;
};

// The sections of a configuration that a GRPO step reads.
struct GrpoSections {
  const GrpoConfig& grpo;
  const BatchConfig& batch;
  const SamplingConfig& sampling;
  uint64_t seed = 0;
  OutcomeCriterion criterion = {};
};

// Tokens of a completion that count in the loss: none without a reward, or if it is truncated and
// mask_truncated_completions leaves it out.
int64_t count_loss_tokens(const Trajectory& completion, double reward, const GrpoConfig& config);

// 1 if a group of `size` completions is solved (all that can be judged are correct), -1 if it has
// failed (all are wrong), else 0. Without a criterion: its rewards are equal and above 0, equal and
// at most 0, or they differ. nullopt: no completion can be judged.
std::optional<int> group_outcome(const RewardSet::Scores& scores, size_t group, int64_t size,
                                 const OutcomeCriterion& criterion = {});

// The rounds of a step that replaced groups without a signal, and the groups that they replaced.
struct Refill {
  int64_t rounds = 0, prompts = 0;  // over all ranks
  // This rank's groups that were solved or have failed, the tokens of their completions and
  // prompts, and the dialogues that the environment has failed, with the first error.
  Moments solved, failed;
  double tokens = 0, failed_dialogues = 0;
  std::string first_error;
  // Counts a group that can be judged.
  void add_outcome(std::optional<int> outcome);
};

// Completions that one rank sampled in a step, with rewards and advantages.
struct ScoredRollouts {
  std::vector<Trajectory> trajectories;
  RewardSet::Scores scores;
  std::vector<double> advantages;  // one per completion
  Refill refill = {};
  // The advantages of the rewards alone, before a KL in the reward, GDPO's standardisation,
  // whitening and clipping; empty: those above.
  std::vector<double> reward_advantages = {};
};

// True if a completion of the group that has tokens in the loss has a reward_advantages other than
// 0.
bool has_signal(const ScoredRollouts& rollouts, size_t group, const GrpoSections& config);

// Sums over the updates of a step.
struct UpdateSums {
  kernels::PolicyLossStats policy;  // over this rank's tokens
  double made = 0;                  // updates whose gradient is not exactly 0
  double loss = 0, grad_norm = 0;   // sums over the updates made
  double clipped = 0;               // updates whose gradient exceeded max_grad_norm
  double ratio_deviation = 0;  // max |ratio - 1| before the first update, before it was corrected
  Moments step_kl;             // KL(old policy, new policy), over this rank's measured tokens
  void add(const Learner::Update& update, const kernels::PolicyLossStats& stats);
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
