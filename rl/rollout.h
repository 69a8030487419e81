// Sampling completions from the policy: the trainer's own weights and kernels, a paged cache, many
// sequences at once. A finished sequence makes room for the next at once.
//
// What is sampled depends on (seed, step, prompt index, sample index, position) only: not on how
// many sequences run together, nor on the number of ranks.
#pragma once

#include <algorithm>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/config.h"
#include "data/example.h"
#include "data/tokenizer.h"
#include "nn/transformer.h"
#include "rl/trajectory.h"

namespace cohort::kernels {
struct SamplingState;
}

namespace cohort {

// Prompts are admitted to one forward up to this many tokens, so that its activations stay small.
inline constexpr int64_t kPrefillTokens = 8192;
// Sequences of the cache beside the sampled ones: a decode step's idle rows write there.
inline constexpr int64_t kIdleSequences = 1;

struct SamplingConfig {
  double temperature = 1, top_p = 1;
  int64_t top_k = 0, max_completion_length = 64;
  int64_t max_concurrent = 256;      // sequences in the cache at once; no result depends on it
  std::vector<int64_t> stop_tokens;  // besides the tokenizer's end of sequence
  // Whether some tokens are never drawn: samples are then off-policy.
  bool restricts() const { return top_k > 0 || top_p < 1; }
  // Tokens that a prompt of `prompt_length` and its completion can reach.
  int64_t max_length(int64_t prompt_length, int64_t context) const {
    return std::min(prompt_length + max_completion_length, context);
  }
  // How many of so many sequences are in the cache at once.
  int64_t concurrent(int64_t sequences) const { return std::min(max_concurrent, sequences); }
  void visit(ConfigVisitor& v) {
    v.field("temperature", temperature, "of the sampling distribution; 0: greedy",
            {.min = 0, .max = 100});
    v.field("top_k", top_k, "draw from the k most likely tokens only (off-policy); 0: off",
            {.min = 0});
    v.field("top_p", top_p,
            "draw from the smallest set with this probability only (off-policy); 1: off",
            {.min = 1e-6, .max = 1});
    v.field("max_completion_length", max_completion_length, "tokens sampled at most",
            {.min = 1, .max = 1 << 24});
    v.field("max_concurrent", max_concurrent, "sequences sampled at once; no result depends on it",
            {.min = 1, .max = 1 << 20});
    v.field("stop_tokens", stop_tokens, "token ids that end a completion, besides end of sequence",
            {.min = 0});
  }
};

// Throws InputError naming a stop token that is outside the vocabulary.
void check_stop_tokens(const SamplingConfig& config, int64_t vocab_size);

// The address of the random draws of one call.
struct SampleAddress {
  uint64_t seed = 0;
  int64_t step = 0;
  // Of each prompt within the step, over all ranks; empty: 0, 1, 2, ...
  std::vector<int64_t> prompt_indices;
};

// What a caller of the sampler hears while it samples.
struct SampleCallbacks {
  // Of each completion as soon as it is complete, in the order in which they end.
  std::function<void(const Trajectory&)> on_finished;
  // Of each token that was drawn, the last of trajectory.tokens. `text` of the trajectory is not
  // set yet. False ends the completion here.
  std::function<bool(const Trajectory&)> on_token;
};

class Sampler {
 public:
  // The sampler refers to model and tokenizer. Throws InputError for a stop token that the model
  // does not have.
  Sampler(const Transformer& model, const Tokenizer& tokenizer, const SamplingConfig& config);
  // `num_generations` completions of each prompt: completion (i, g) is element
  // i * num_generations + g. Throws InputError naming the prompt if it is empty, cannot be
  // tokenised, or leaves no room in the context for one token, NonFiniteError where logits are not
  // finite.
  std::vector<Trajectory> sample(std::span<const Example> prompts, int64_t num_generations,
                                 const SampleAddress& address,
                                 const SampleCallbacks& callbacks = {}) const;

 private:
  struct Sequence;
  struct Session;
  struct Inputs;
  struct Drawn;
  class Decoder;
  void draw(Drawn& out, const Tensor& hidden, kernels::SamplingState& state, const Tensor& slots,
            const Tensor& indices) const;
  void prefill_step(Session& session) const;
  void decode_step(Session& session) const;
  std::vector<Trajectory> start(std::span<const Example> prompts, int64_t num_generations,
                                const SampleAddress& address) const;
  void admit(Session& session) const;
  void append_tokens(Session& session, const Drawn& drawn) const;
  const Transformer& model_;
  const Tokenizer& tokenizer_;
  SamplingConfig config_;
  std::vector<int32_t> stop_tokens_;
};

}  // namespace cohort
