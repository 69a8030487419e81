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

double token_weight(LossType type, const StepTotals& totals, int64_t length,
                    int64_t max_completion_length) {
  // All totals are 0 if every token is masked.
  const LossSizes sizes = {
      .sequences = std::max(totals.sequences, 1.0),
      .tokens = std::max(totals.tokens, 1.0),
      .length = static_cast<double>(std::max<int64_t>(length, 1)),
      .max_completion_length = static_cast<double>(std::max<int64_t>(max_completion_length, 1))};
  for (const LossTypeEntry& entry : kLossTypes)
    if (entry.value == type) return 1 / entry.denominator(sizes);
  throw Error("[token_weight] expected a loss type of kLossTypes");
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
