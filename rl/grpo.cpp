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

// Per-token values of one micro batch while it is filled.
struct TokenColumns {
  std::vector<double> old_logprob, advantage, weight;
  // Inputs 0 .. n - 2 of a sequence of n tokens; input i answers for token i + 1.
  void append(const PolicySequence& s, double token_weight) {
    const auto prompt = static_cast<size_t>(s.trajectory->prompt_length) - 1;
    const auto& logprobs = s.trajectory->logprobs;
    for (auto* column : {&old_logprob, &advantage, &weight})
      column->insert(column->end(), prompt, 0.0);
    const double keep = s.masked ? 0 : 1;
    for (const double lp : logprobs) old_logprob.push_back(lp * keep);
    advantage.insert(advantage.end(), logprobs.size(), s.advantage * keep);
    weight.insert(weight.end(), logprobs.size(), token_weight * keep);
  }
};

void check_sequence(const PolicySequence& s) {
  COHORT_CHECK(s.trajectory != nullptr, "[pack_policy] sequence ", s.number, " has no trajectory");
  const Trajectory& c = *s.trajectory;
  COHORT_CHECK(c.prompt_length >= 1 && c.completion_length() >= 1,
               "[pack_policy] expected a prompt and a completion in sequence ", s.number, ", got ",
               c.prompt_length, " and ", c.completion_length(), " tokens");
  COHORT_CHECK(static_cast<int64_t>(c.logprobs.size()) == c.completion_length(),
               "[pack_policy] sequence ", s.number, " has ", c.completion_length(),
               " completion tokens and ", c.logprobs.size(), " log-probs");
}

TokenSequence token_sequence(const PolicySequence& s) {
  TokenSequence out{.tokens = s.trajectory->tokens, .loss_mask = {}, .number = s.number};
  out.loss_mask.resize(out.tokens.size(), 0);
  if (!s.masked)
    std::fill(out.loss_mask.begin() + s.trajectory->prompt_length, out.loss_mask.end(), 1);
  return out;
}

PolicyBatch pack_micro_batch(std::span<const PolicySequence> sequences,
                             const PackPolicyDesc& desc) {
  PolicyBatch batch;
  TokenColumns columns;
  std::vector<TokenSequence> tokens;
  for (const PolicySequence& s : sequences) {
    tokens.push_back(token_sequence(s));
    columns.append(s, token_weight(desc.loss_type, desc.totals, s.trajectory->completion_length(),
                                   desc.max_completion_length));
    batch.groups.push_back(s.trajectory->group);
    batch.parents.push_back(-1);
  }
  batch.packed = pack(tokens);
  batch.old_logprob = Tensor::from(columns.old_logprob).to(desc.dtype);
  batch.advantage = Tensor::from(columns.advantage).to(desc.dtype);
  batch.weight = Tensor::from(columns.weight).to(desc.dtype);
  batch.policy_version =
      Tensor::full({batch.packed.size()}, static_cast<double>(desc.policy_version), DType::kI32);
  return batch;
}

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

PolicyBatch place(const Transformer& model, const PolicyBatch& batch) {
  PolicyBatch placed = batch;
  placed.packed = model.place(batch.packed);
  for (Tensor* t : {&placed.old_logprob, &placed.ref_logprob, &placed.advantage, &placed.weight})
    *t = t->to(model.device());
  return placed;
}

StepTotals count_totals(std::span<const PolicySequence> sequences) {
  StepTotals totals;
  for (const PolicySequence& s : sequences) {
    totals.sequences += 1;
    if (!s.masked) totals.tokens += static_cast<double>(s.trajectory->completion_length());
  }
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

Minibatch pack_policy(std::span<const PolicySequence> sequences, const PackPolicyDesc& desc) {
  for (const PolicySequence& s : sequences) check_sequence(s);
  Minibatch batches;
  for (const auto part : micro_batches(sequences, desc.micro_batch_tokens))
    batches.push_back(pack_micro_batch(part, desc));
  return batches;
}

TokenLogProbs policy_log_probs(const Transformer& model, const PackedBatch& batch,
                               double temperature) {
  const Variable hidden = model.forward(batch, {.mode = Mode::kEval});
  return token_log_probs(hidden, model.head(), batch.targets, {.temperature = temperature});
}

Variable grpo_loss(const Variable& logprob, const PolicyBatch& batch, const GrpoConfig& config,
                   Tensor& stats) {
  return policy_loss(logprob,
                     {.old_logprob = batch.old_logprob,
                      .ref_logprob = batch.ref_logprob,
                      .advantage = batch.advantage,
                      .weight = batch.weight},
                     config.loss_desc(), stats);
}

}  // namespace cohort
