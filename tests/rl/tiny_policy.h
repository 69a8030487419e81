// A policy small enough for exact tests in f64, and random completions in all relevant shapes:
// prompts and completions of one token, truncated ones, several prompts in a batch.
#pragma once

#include <vector>

#include "core/rng.h"
#include "rl/grpo_loss.h"
#include "tests/support/test_util.h"

namespace cohort::test {

constexpr int64_t kVocab = 11, kMaxCompletion = 6;
constexpr int32_t kEos = 10;

// Two layers, grouped-query attention, query and key norms. Weights are large enough for log-probs
// that differ from token to token.
inline ModelConfig tiny_model() {
  ModelConfig config;
  config.num_layers = 2;
  config.d_model = 16;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.d_ff = 24;
  config.context = 16;
  config.qk_norm = true;
  config.init_std = 0.4;
  config.vocab_size = kVocab;
  config.resolve();
  return config;
}

// Prompts of 1 to 4 tokens, completions of 1 to kMaxCompletion; every third one is truncated, the
// others end in kEos. Log-probs are 0: see record_logprobs().
inline std::vector<Trajectory> random_completions(size_t count, uint64_t seed) {
  Rng rng(seed, rng_stream(kTestPurpose));
  std::vector<Trajectory> completions(count);
  for (size_t i = 0; i < count; ++i) {
    Trajectory& c = completions[i];
    c.prompt_length = rng.between(1, 4);
    c.group = static_cast<int64_t>(i / 2);
    if (i % 3 == 2) c.stop_reason = StopReason::kLength;
    c.index = static_cast<int64_t>(i);
    const int64_t length = c.truncated() ? kMaxCompletion : rng.between(1, kMaxCompletion);
    for (int64_t t = 0; t < c.prompt_length + length; ++t) {
      c.tokens.push_back(static_cast<int32_t>(rng.below(kEos)));
      c.loss_mask.push_back(t >= c.prompt_length);
      c.logprobs.push_back(0);
    }
    if (!c.truncated()) c.tokens.back() = kEos;
  }
  return completions;
}

// Log-prob per token (0 for prompt tokens), from a forward of this sequence alone.
inline std::vector<double> completion_logprobs(const Transformer& model, const Trajectory& c,
                                               double temperature = 1) {
  NoGradGuard no_grad;
  const TokenSequence sequence{.tokens = c.tokens, .loss_mask = c.loss_mask};
  const PackedBatch batch = model.to_device(pack({&sequence, 1}));
  const auto target_logprobs =
      policy_log_probs(model, batch, temperature).logprob.value().to_vector<double>();
  std::vector<double> all(c.tokens.size(), 0.0);
  auto next = target_logprobs.begin();
  for (size_t t = 1; t < all.size(); ++t)
    if (c.loss_mask[t] != 0) all[t] = *next++;
  return all;
}

inline void record_logprobs(const Transformer& model, std::vector<Trajectory>& completions) {
  for (Trajectory& c : completions) c.logprobs = completion_logprobs(model, c);
}

// Treatment of the loss masks of truncated completions.
enum class Truncated { kKeep, kMask };
inline std::vector<PolicySequence> sequences_of(const std::vector<Trajectory>& completions,
                                                const std::vector<double>& advantages,
                                                Truncated truncated = Truncated::kKeep) {
  std::vector<PolicySequence> sequences;
  for (size_t i = 0; i < completions.size(); ++i) {
    sequences.push_back(policy_sequence(completions[i], advantages[i]));
    if (truncated == Truncated::kMask && completions[i].truncated())
      sequences.back().loss_mask.assign(completions[i].tokens.size(), 0);
  }
  return sequences;
}

inline std::vector<double> random_advantages(size_t count, uint64_t seed) {
  Rng rng(seed, rng_stream(kTestPurpose, 1));
  std::vector<double> advantages(count);
  for (double& a : advantages) a = rng.normal();
  return advantages;
}

inline PackPolicyDesc pack_desc(LossType type, std::span<const PolicySequence> sequences,
                                int64_t micro_batch_tokens = 1000) {
  return {.loss_type = type,
          .totals = count_totals(sequences),
          .max_completion_length = kMaxCompletion,
          .micro_batch_tokens = micro_batch_tokens,
          .dtype = DType::kF64};
}

// Reference log-probs of a batch under a second model.
inline void add_reference(PolicyBatch& batch, const Transformer& reference) {
  NoGradGuard no_grad;
  batch.ref_logprob = policy_log_probs(reference, batch, 1).logprob.value().clone();
}

struct UpdateResult {
  double loss = 0;
  std::vector<Tensor> gradients;             // [parameter]
  kernels::PolicyLossStats stats;            // last micro batch
  std::vector<double> max_ratio_deviations;  // [micro batch]
};

// Forward and backward of one optimiser update.
inline UpdateResult run_update(const Transformer& model, const Minibatch& minibatch,
                               const GrpoConfig& config, bool on_policy = false) {
  UpdateResult result;
  for (const NamedParameter& p : model.parameters()) p.grad().zero_();
  for (const PolicyBatch& batch : minibatch) {
    const HeadLoss made =
        grpo_loss(model.hidden_at_targets(batch), model.head(), batch, config, 1, on_policy);
    backward(made);
    result.loss += made.loss.item();
    result.stats = kernels::PolicyLossStats::from(made.stats);
    result.max_ratio_deviations.push_back(result.stats.max_ratio_deviation);
  }
  for (const NamedParameter& p : model.parameters()) result.gradients.push_back(p.grad().clone());
  return result;
}

}  // namespace cohort::test
