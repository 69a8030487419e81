// Packing of one optimiser update into micro batches, and the loss of one of them. What makes the
// split harmless: each token carries its final weight, one over the denominator of the whole
// update, so micro batches and ranks only ever add.
#include "rl/grpo.h"

#include <algorithm>

namespace cohort {
namespace {

constexpr EnumName<LossType> kLossTypes[] = {{LossType::kGrpo, "grpo"},
                                             {LossType::kDapo, "dapo"},
                                             {LossType::kDrGrpo, "dr_grpo"},
                                             {LossType::kBnpo, "bnpo"}};
constexpr EnumName<AdvantageScale> kScales[] = {{AdvantageScale::kGroup, "group"},
                                                {AdvantageScale::kNone, "none"},
                                                {AdvantageScale::kLeaveOneOut, "leave_one_out"}};

}  // namespace

void GrpoConfig::visit(ConfigVisitor& v) {
  v.field("epsilon", epsilon, "how far below 1 the ratio may fall before it is clipped",
          {.min = 0, .max = 1});
  v.field("epsilon_high", epsilon_high, "how far above 1 it may rise; none: epsilon", {.min = 0});
  v.field("beta", beta, "weight of the KL to the frozen start model; 0: none is kept", {.min = 0});
  v.choice("loss_type", loss_type, kLossTypes, "how token losses are averaged");
  v.choice("scale_rewards", scale_rewards, kScales,
           "advantage: (r - mean) / std of the group, r - mean, or r - mean of the others");
  v.field("num_iterations", num_iterations, "passes over each step's completions",
          {.min = 1, .max = 1000});
  v.field("num_minibatches", num_minibatches, "optimiser updates per pass",
          {.min = 1, .max = 100000});
  v.field("mask_truncated_completions", mask_truncated_completions,
          "completions cut at the length limit teach nothing");
  v.field("shuffle_advantages", shuffle_advantages,
          "control experiment: advantages of random other completions");
}

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
  // At least 1 each: where everything is masked there is nothing to weigh, and nothing to divide
  // by.
  const double sequences = std::max(totals.sequences, 1.0), tokens = std::max(totals.tokens, 1.0);
  switch (type) {
    case LossType::kGrpo:
      return 1 / (sequences * static_cast<double>(std::max<int64_t>(length, 1)));
    case LossType::kDrGrpo:
      return 1 / (sequences * static_cast<double>(std::max<int64_t>(max_completion_length, 1)));
    case LossType::kDapo:
    case LossType::kBnpo:
      break;
  }
  return 1 / tokens;
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
  const Variable hidden = model.forward(batch, {.mode = Mode::kEval});
  return token_log_probs(hidden, model.head(), batch.targets, {.temperature = temperature});
}

LossAndStats grpo_loss(const Variable& logprob, const PackedBatch& batch,
                       const GrpoConfig& config) {
  const auto reference = batch.columns.find("ref_logprob");
  return policy_loss(
      logprob,
      {.old_logprob = batch.column("old_logprob"),
       .ref_logprob = reference == batch.columns.end() ? Tensor() : reference->second,
       .advantage = batch.column("advantage"),
       .weight = batch.column("weight")},
      config.loss_desc());
}

}  // namespace cohort
