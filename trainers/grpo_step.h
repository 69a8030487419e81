// The parts of a GRPO step between its rollouts and its metrics: who samples which prompts, how
// completions become minibatches, and the updates. Free of files and signals; every rank makes the
// same calls.
#pragma once

#include <span>
#include <vector>

#include "trainers/grpo_metrics.h"

namespace cohort {

// A rank's prompts of one step. The step's prompts are cut into minibatches first and each
// minibatch over the ranks, so that the same prompts share an update for any number of ranks.
struct PromptShare {
  std::vector<int64_t> numbers;          // of the prompts within the step
  std::vector<int64_t> minibatch_begin;  // index into `numbers` of each minibatch, and the end
};
PromptShare share_prompts(const Communicator& comm, const TrainConfig& config, int64_t step);

// How many completions of the step a reward applies to, over all ranks.
int64_t count_rewarded(Communicator& comm, const RewardSet::Scores& scores);

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

// Log-probs of the packed tokens under the frozen reference, for the KL term.
void add_reference_log_probs(const Transformer& reference, std::vector<Minibatch>& minibatches,
                             double temperature);

// num_iterations passes over the minibatches. The weights of the first update are those that
// sampled, so its ratios must be exactly 1. Where they are not, the recorded log-probs are wrong:
// the update is not made, those of all minibatches are computed again, and it is repeated.
UpdateSums update_policy(Communicator& comm, Learner& learner, std::vector<Minibatch>& minibatches,
                         const TrainConfig& config, double learning_rate);

}  // namespace cohort
