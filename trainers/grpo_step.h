// A GRPO step as a function: rollouts, rewards, advantages, updates, metrics. Free of files,
// reporters and signals; every rank makes the same calls.
#pragma once

#include <span>
#include <vector>

#include "rl/rollout.h"
#include "trainers/grpo_metrics.h"

namespace cohort {

// A rank's prompts of one step. The step's prompts are cut into minibatches first and each
// minibatch over the ranks, so that the same prompts share an update for any number of ranks.
struct PromptShare {
  std::vector<int64_t> indices;          // of the prompts within the step
  std::vector<int64_t> minibatch_begin;  // in `indices`, of each minibatch, and the end
};
PromptShare share_prompts(const Communicator& comm, const TrainConfig& config, int64_t step);

struct GrpoStep {
  Communicator& comm;
  const TrainConfig& config;
  const Sampler& sampler;  // of the learner's model
  const RewardSet& rewards;
  Learner& learner;
  const Transformer* reference;  // frozen, for the KL term; nullptr: none
  std::span<const Example> prompts;
  const PromptShare& share;  // the prompts' indices within the step
  int64_t step = 0;          // addresses the random draws
  double learning_rate = 0;
};
struct GrpoStepResult {
  Metrics metrics;             // of all ranks, under the names of docs/grpo.md, section 9
  ScoredRollouts rollouts;     // of this rank
  int64_t rewarded_count = 0;  // completions of all ranks to which a reward applies; 0: no update
};
// Throws NonFiniteError on all ranks where one of them meets what is not finite.
GrpoStepResult grpo_step(const GrpoStep& in);

// ---- Its parts

// The control experiment: the advantages of a step over all ranks, dealt to random completions. The
// deal depends on seed and step only.
std::vector<double> shuffled_advantages(Communicator& comm, const std::vector<double>& advantages,
                                        const PromptShare& share, const TrainConfig& config,
                                        int64_t step);

// The micro batches of each optimiser update on the model's device, with the denominators of the
// whole update over all ranks. An update without a token in the loss mask of any rank is left out.
// `advantages`: of each completion, those of `rollouts` or the shuffled ones.
std::vector<Minibatch> pack_minibatches(Communicator& comm, const Transformer& model,
                                        const ScoredRollouts& rollouts,
                                        std::span<const double> advantages,
                                        const PromptShare& share, const TrainConfig& config);

// num_iterations passes over the minibatches. The weights of the first update are those that
// sampled, so its ratios must be exactly 1, and those of all minibatches before it, which are
// checked every config.grpo.ratio_check_every steps. Where they are not, the recorded log-probs are
// wrong: the update is not made, those of all minibatches are computed again, and it is repeated.
UpdateSums update_policy(Communicator& comm, Learner& learner, std::vector<Minibatch>& minibatches,
                         const TrainConfig& config, double learning_rate, int64_t step = 0);

}  // namespace cohort
