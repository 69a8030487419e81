// Sampling completions from the policy: the trainer's own weights and kernels, a paged cache, many
// sequences at once. A finished sequence makes room for the next at once.
//
// What is sampled depends on (seed, step, prompt number, sample number, position) only: not on how
// many sequences run together, nor on the number of ranks.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "core/config.h"
#include "data/example.h"
#include "data/tokenizer.h"
#include "nn/transformer.h"

namespace cohort {

// Prompts are admitted to one forward up to this many tokens, so that its activations stay small.
inline constexpr int64_t kPrefillTokens = 8192;

struct SamplingConfig {
  double temperature = 1, top_p = 1;
  int64_t top_k = 0, max_completion_length = 64;
  int64_t max_concurrent = 256;      // sequences in the cache at once; no result depends on it
  std::vector<int64_t> stop_tokens;  // besides the tokenizer's end of sequence
  // Whether some tokens are never drawn: samples are then off-policy.
  bool restricts() const { return top_k > 0 || top_p < 1; }
  void visit(ConfigVisitor& v);
};

// Throws InputError naming a stop token that is outside the vocabulary.
void check_stop_tokens(const SamplingConfig& config, int64_t vocab_size);

enum class StopReason {
  kStopToken,
  kLength,   // max_completion_length
  kContext,  // the model has no room for more
};

// The record of one rollout: a prompt and what was sampled after it.
struct Trajectory {
  std::vector<int32_t> tokens;   // prompt and completion, the stop token included
  int64_t prompt_length = 0;     // in tokens
  int64_t group = 0;             // number of the prompt within the step, over all ranks
  std::vector<double> logprobs;  // of each completion token when it was drawn: tokens.size() -
                                 // prompt_length of them
  // Sums over the completion's tokens, when each was drawn: the entropy in nats of the full
  // distribution at the temperature (1 for greedy), and the probability that top_k and top_p left
  // out.
  double entropy = 0, cut = 0;
  StopReason stop_reason = StopReason::kStopToken;
  std::string text;  // the completion, decoded; special tokens (end of sequence) give no text
  bool truncated() const { return stop_reason != StopReason::kStopToken; }
  int64_t completion_length() const { return static_cast<int64_t>(tokens.size()) - prompt_length; }
};

// `num_generations` completions of each prompt: completion (i, g) is
// samples[i * num_generations + g].
struct Rollouts {
  std::vector<Example> prompts;
  std::vector<Trajectory> samples;
  int64_t num_generations = 1;
  int64_t policy_version = 0;  // optimiser updates the sampling weights had seen
};

// The address of the random draws of one call.
struct SampleAddress {
  uint64_t seed = 0;
  int64_t step = 0;
  // Of each prompt within the step, over all ranks; empty: 0, 1, 2, ...
  std::vector<int64_t> prompt_numbers;
};

class Sampler {
 public:
  // The sampler refers to model and tokenizer. Throws InputError if top_k, top_p or lengths do not
  // fit the model.
  Sampler(const Transformer& model, const Tokenizer& tokenizer, const SamplingConfig& config);
  // Throws InputError naming the prompt if it is empty, cannot be tokenised, or leaves no room in
  // the context for one token, NonFiniteError where logits are not finite.
  Rollouts sample(std::span<const Example> prompts, int64_t num_generations,
                  const SampleAddress& address) const;

 private:
  struct Sequence;
  struct Session;
  struct Drawn;
  class Decoder;
  void draw(Drawn& out, const Tensor& hidden, const Tensor& streams, const Tensor& indices,
            uint64_t seed) const;
  void prefill_step(Session& session) const;
  void decode_step(Session& session) const;
  void take(Session& session, const Drawn& drawn) const;
  const Transformer& model_;
  const Tokenizer& tokenizer_;
  SamplingConfig config_;
  std::vector<int32_t> stop_tokens_;
};

}  // namespace cohort
