// Packing of one optimiser update into micro batches, and the loss of one of them. Each token has
// its final weight, one over the denominator of the whole update, so that the losses and gradients
// of micro batches and ranks add up.
#include "rl/grpo.h"

#include <algorithm>

namespace cohort {

TokenSequence policy_sequence(const Trajectory& t, double advantage) {
  COHORT_CHECK(t.prompt_length >= 1 && t.completion_length() >= 1,
               "[policy_sequence] expected a prompt and a completion in sequence ", t.index,
               ", got ", t.prompt_length, " and ", t.completion_length(), " tokens");
  return {.tokens = t.tokens,
          .loss_mask = t.loss_mask,
          .index = t.index,
          .columns = {{"old_logprob", t.logprobs},
                      {"advantage", std::vector<double>(t.tokens.size(), advantage)}}};
}

StepTotals count_totals(std::span<const TokenSequence> sequences) {
  StepTotals totals{.sequences = static_cast<double>(sequences.size())};
  for (const TokenSequence& s : sequences) totals.tokens += static_cast<double>(s.num_targets());
  return totals;
}

double token_weight(LossType type, const StepTotals& step_totals, int64_t tokens,
                    int64_t max_tokens) {
  // All totals are 0 if every token is masked.
  const StepTotals totals = {std::max(step_totals.sequences, 1.0),
                             std::max(step_totals.tokens, 1.0)};
  [[maybe_unused]] const auto length = static_cast<double>(std::max<int64_t>(tokens, 1)),
                              max_completion_length =
                                  static_cast<double>(std::max<int64_t>(max_tokens, 1));
#define COHORT_WEIGHT(type_, name, denominator) \
  if (type == LossType::type_) return 1 / (denominator);
  COHORT_LOSS_TYPES(COHORT_WEIGHT)
#undef COHORT_WEIGHT
  return 0;
}

Minibatch pack_policy(std::vector<TokenSequence> sequences, const PackPolicyDesc& desc) {
  for (TokenSequence& s : sequences)
    s.columns["weight"].assign(
        s.tokens.size(),
        token_weight(desc.loss_type, desc.totals, s.num_targets(), desc.max_completion_length));
  return pack_micro_batches(sequences, desc.micro_batch_tokens, desc.dtype);
}

TokenLogProbs policy_log_probs(const Transformer& model, const PackedBatch& batch,
                               double temperature) {
  return token_log_probs(model.hidden_at_targets(batch, {.mode = Mode::kEval}), model.head(),
                         batch.targets, {.temperature = temperature});
}

LossAndStats grpo_loss(const Variable& hidden, const Variable& head, const PackedBatch& batch,
                       const GrpoConfig& config, double temperature) {
  const auto reference = batch.columns.find("ref_logprob");
  return policy_loss(
      hidden, head, batch.targets,
      {.old_logprob = batch.column("old_logprob"),
       .ref_logprob = reference == batch.columns.end() ? Tensor() : reference->second,
       .advantage = batch.column("advantage"),
       .weight = batch.column("weight")},
      config.loss_desc(), {.temperature = temperature});
}

}  // namespace cohort
