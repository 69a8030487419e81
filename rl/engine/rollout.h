// Sampling completions from the policy: turns prompts into requests to the rollout engine, and the
// engine's tokens into trajectories.
//
// The sampled tokens depend on (seed, step, prompt index, sample index, position) only: not on the
// number of concurrent sequences, nor on the number of ranks. Those of a dialogue
// (rl/engine/environment.h) depend on the observations too, not on when they came. No token is
// encoded twice: a turn stays as it was sampled.
#pragma once

#include <algorithm>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "config/visitor.h"
#include "data/example.h"
#include "rl/engine/engine.h"
#include "rl/engine/environment.h"
#include "rl/engine/trajectory.h"
#include "text/tokenizer.h"

namespace cohort {

struct SamplingConfig {
  double temperature = 1, top_p = 1, min_p = 0;
  int64_t top_k = 0, max_completion_length = 64;
  int64_t max_total_length = 0;  // limits prompt and completion together; 0: the context; no key
  double repetition_penalty = 1, presence_penalty = 0, frequency_penalty = 0;
  std::vector<std::string> logit_bias;    // ID:BIAS
  std::vector<int64_t> stop_tokens;       // besides the tokenizer's end of sequence
  std::vector<std::string> stop_strings;  // a completion ends where its text has one of them
  // Returns true if tokens are sampled from another distribution than the policy's, which makes
  // them off-policy.
  bool restricts() const;
  // Maximum length of a prompt of `prompt_length` tokens with its completion.
  int64_t max_length(int64_t prompt_length, int64_t context) const {
    return std::min(prompt_length + max_completion_length, context);
  }
  void visit(ConfigVisitor& v);
};

// Throws InputError naming a stop token or a bias outside the vocabulary of `vocab_size` tokens, or
// a stop string that no completion can contain: an empty one, or one with a control token, which
// gives no text.
void check_sampling_tokens(const SamplingConfig& config, const Tokenizer& tokenizer,
                           int64_t vocab_size);

// Address of the random draws of one call.
struct SampleAddress {
  uint64_t seed = 0;
  int64_t step = 0;
  // Index of each prompt within the step, over all ranks; empty: 0, 1, 2, ...
  std::vector<int64_t> prompt_indices;
  std::vector<int32_t> adapters = {};  // one for each prompt; empty: the model's first
  int64_t repeats = 1;  // so many prompts in a row are one, which share random numbers
};

// Progress callbacks of Sampler::sample().
struct SampleCallbacks {
  // Called for each completion as soon as it ends, in the order in which they end, with its prompt.
  std::function<void(const Example&, const Trajectory&)> on_finished;
  // Called for each sampled token, the last of trajectory.tokens. `text` of the trajectory has no
  // unfinished character yet. Returning false ends the completion.
  std::function<bool(const Trajectory&)> on_token;
};

// The text of a trajectory's last turn as templates spell it, without the stop token that ended it.
std::string turn_text(const Tokenizer& tokenizer, const Trajectory& trajectory);

// The trajectory of a model that answers an empty prompt with the tokens of `text`: its text, and
// where stop tokens and stop strings end it, are a sampled completion's. It has no tokens, and the
// text as given, if the tokenizer cannot encode it.
Trajectory as_sampled(const std::string& text, const Tokenizer& tokenizer,
                      const SamplingConfig& config);

// The prompts with the beginnings that the environment gives them, if it starts(); a prompt without
// one has a start_error. Throws what the environment throws.
std::vector<Example> begin_dialogues(const DialogueOptions& dialogue,
                                     std::span<const Example> prompts, int64_t num_generations,
                                     const SampleAddress& address);

class Sampler {
 public:
  // Keeps references to engine, tokenizer and environment. Throws InputError for a stop token or a
  // bias outside the model's vocabulary.
  Sampler(Engine& engine, const Tokenizer& tokenizer, const SamplingConfig& config,
          const DialogueOptions& dialogue = {});
  // Samples `num_generations` completions of each prompt: completion (i, g) is element
  // i * num_generations + g. With an environment they are dialogues, in which max_completion_length
  // is the limit of the sampled tokens of all turns. Throws InputError naming the prompt if it is
  // empty, cannot be tokenised, or fills the context, and what Engine::step() and the environment
  // throw. Dialogues of a prompt with a start_error have failed. The engine must have no other
  // requests.
  std::vector<Trajectory> sample(std::span<const Example> prompts, int64_t num_generations,
                                 const SampleAddress& address,
                                 const SampleCallbacks& callbacks = {}) const;

  // begin_dialogues(), for whose prompts there must be room.
  std::vector<Example> begin(std::span<const Example> prompts, int64_t num_generations,
                             const SampleAddress& address) const;

  Engine& engine() const { return engine_; }
  const DialogueOptions& dialogue() const { return dialogue_; }

 private:
  struct OpenCompletion;
  class Call;
  std::vector<Trajectory> start(std::span<const Example> prompts, int64_t num_generations,
                                const SampleAddress& address) const;
  int64_t max_length() const;
  EngineRequest request(std::span<const Trajectory> group, const SampleAddress& address) const;
  Engine& engine_;
  const Tokenizer& tokenizer_;
  SamplingConfig config_;
  DialogueOptions dialogue_;
  std::vector<int32_t> stop_tokens_;
  LogitBias logit_bias_;
};

}  // namespace cohort
