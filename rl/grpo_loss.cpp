#include "rl/grpo_loss.h"

namespace cohort {

TokenLogProbs policy_log_probs(const Transformer& model, const PackedBatch& batch,
                               double temperature, Adapters adapters) {
  return token_log_probs(
      model.hidden_at_targets(batch, {.mode = Mode::kEval, .adapters = adapters}), model.head(),
      batch.targets, {.temperature = temperature});
}

HeadLoss grpo_loss(const Variable& hidden, const HeadWeights& head, const PolicyBatch& batch,
                   const GrpoConfig& config, double temperature, bool on_policy,
                   std::optional<HeadTeacher> teacher) {
  return policy_loss(hidden, head, batch.targets,
                     {.old_logprob = batch.old_logprob,
                      .ref_logprob = batch.ref_logprob,
                      .advantage = batch.advantage,
                      .weight = batch.weight,
                      .sampling_logprob = batch.sampling_logprob,
                      .segments = batch.segments,
                      .on_policy = on_policy,
                      .teacher = std::move(teacher)},
                     config.loss_desc(), {.temperature = temperature});
}

}  // namespace cohort
