// The rollout loop. One forward per step serves prefills and decodes alike: every active sequence
// brings the tokens the cache has not seen yet (its prompt at first, then its last token) and gets
// one new token.
#include "rl/rollout.h"

#include <algorithm>

#include "core/log.h"
#include "kernels/embedding.h"
#include "kernels/sampling.h"

namespace cohort {

namespace {
// Prompt tokens admitted in one forward, so that its activations stay small.
constexpr int64_t kPrefillTokens = 8192;
}  // namespace

void SamplingConfig::visit(ConfigVisitor& v) {
  v.field("temperature", temperature, "of the sampling distribution; 0: greedy",
          {.min = 0, .max = 100});
  v.field("top_k", top_k, "draw from the k most likely tokens only (off-policy); 0: off",
          {.min = 0});
  v.field("top_p", top_p,
          "draw from the smallest set with this probability only (off-policy); 1: off",
          {.min = 1e-6, .max = 1});
  v.field("max_completion_length", max_completion_length, "tokens sampled at most", {.min = 1});
  v.field("max_concurrent", max_concurrent, "sequences sampled at once; no result depends on it",
          {.min = 1, .max = 1 << 20});
  v.field("stop_tokens", stop_tokens, "token ids that end a completion, besides end of sequence",
          {.min = 0});
}

struct Sampler::Sequence {
  Completion* out = nullptr;
  int64_t limit = 0;    // completion tokens at most
  uint64_t stream = 0;  // of its random draws
  int64_t cached = 0;   // tokens the cache holds
  int32_t row = -1;     // of the cache; -1: waiting
  bool done = false;
};

Sampler::Sampler(const Transformer& model, const Tokenizer& tokenizer, const SamplingConfig& config)
    : model_(model), tokenizer_(tokenizer), config_(config), stop_tokens_{tokenizer.eos_id()} {
  const int64_t vocab = model.config().vocab_size;
  for (const int64_t id : config.stop_tokens) {
    if (id >= vocab)
      throw InputError(str("stop_tokens: ", id, " is outside the vocabulary of ", vocab));
    stop_tokens_.push_back(static_cast<int32_t>(id));
  }
}

Rollouts Sampler::sample(std::span<const Example> prompts, int64_t num_generations,
                         const SampleAddress& address) const {
  const int64_t context = model_.config().context;
  Rollouts rollouts;
  rollouts.prompts.assign(prompts.begin(), prompts.end());
  rollouts.num_generations = num_generations;
  rollouts.samples.resize(prompts.size() * static_cast<size_t>(num_generations));
  std::vector<Sequence> sequences(rollouts.samples.size());
  int64_t longest = 1;
  for (size_t i = 0; i < prompts.size(); ++i) {
    const int64_t number =
        address.prompt_numbers.empty() ? static_cast<int64_t>(i) : address.prompt_numbers.at(i);
    rollouts.prompt_numbers.push_back(number);
    const std::vector<int32_t> ids = tokenizer_.encode(prompts[i].prompt);
    const auto length = static_cast<int64_t>(ids.size());
    if (length == 0)
      throw InputError(
          str("prompt ", number, " is empty; a completion needs at least one token to follow"));
    if (length >= context)
      throw InputError(
          str("prompt ", number, " has ", length, " tokens, the model's context is ", context,
              ": no room for a completion; hint: a larger model.context or shorter prompts"));
    const int64_t limit = std::min(config_.max_completion_length, context - length);
    longest = std::max(longest, length + limit);
    for (int64_t g = 0; g < num_generations; ++g) {
      const size_t k = i * static_cast<size_t>(num_generations) + static_cast<size_t>(g);
      rollouts.samples[k].tokens = ids;
      rollouts.samples[k].prompt_length = length;
      const uint64_t sample = static_cast<uint64_t>(number) << 24 | static_cast<uint64_t>(g);
      sequences[k] = {
          .out = &rollouts.samples[k],
          .limit = limit,
          .stream = rng_stream(RngPurpose::kSample, static_cast<uint64_t>(address.step), sample)};
    }
  }
  if (sequences.empty()) return rollouts;

  const ModelConfig& c = model_.config();
  KVCache cache({.num_layers = c.num_layers,
                 .num_kv_heads = c.num_kv_heads,
                 .head_dim = c.head_dim,
                 .num_sequences = std::min<int64_t>(config_.max_concurrent,
                                                    static_cast<int64_t>(sequences.size())),
                 .max_length = longest},
                model_.dtype());
  std::vector<Sequence*> active;
  size_t next = 0;
  while (next < sequences.size() || !active.empty()) {
    int64_t prefill = 0;
    while (next < sequences.size() && cache.free_rows() > 0 && prefill < kPrefillTokens) {
      Sequence& sequence = sequences[next++];
      sequence.row = cache.acquire();
      prefill += sequence.out->prompt_length;
      active.push_back(&sequence);
    }
    step(active, cache, address);
    for (Sequence* sequence : active)
      if (sequence->done) cache.release(sequence->row);
    std::erase_if(active, [](const Sequence* s) { return s->done; });
  }
  for (Completion& sample : rollouts.samples) {
    std::span<const int32_t> ids(sample.tokens);
    ids = ids.subspan(static_cast<size_t>(sample.prompt_length));
    if (!sample.truncated) ids = ids.first(ids.size() - 1);
    sample.text = tokenizer_.decode(ids);
  }
  return rollouts;
}

void Sampler::step(std::vector<Sequence*>& active, KVCache& cache,
                   const SampleAddress& address) const {
  std::vector<int32_t> tokens, rows, positions, last;
  std::vector<int64_t> streams, indices;
  for (const Sequence* s : active) {
    const auto length = static_cast<int64_t>(s->out->tokens.size());
    cache.reserve(s->row, length);
    for (int64_t p = s->cached; p < length; ++p) {
      tokens.push_back(s->out->tokens[static_cast<size_t>(p)]);
      rows.push_back(s->row);
      positions.push_back(static_cast<int32_t>(p));
    }
    last.push_back(static_cast<int32_t>(tokens.size() - 1));
    streams.push_back(static_cast<int64_t>(s->stream));
    indices.push_back(length);
  }
  const Tensor hidden = model_.forward_cached(Tensor::from(tokens), Tensor::from(rows),
                                              Tensor::from(positions), cache);
  const auto n = static_cast<int64_t>(active.size());
  Tensor x = Tensor::empty({n, hidden.dim(1)}, hidden.dtype());
  kernels::embedding_forward(x, hidden, Tensor::from(last));
  Tensor drawn = Tensor::empty({n}, DType::kI32), logprob = Tensor::empty({n}, hidden.dtype());
  kernels::head_sample(drawn, logprob, x, model_.head().value(), Tensor::from(streams),
                       Tensor::from(indices),
                       {.temperature = config_.temperature,
                        .top_k = config_.top_k,
                        .top_p = config_.top_p,
                        .seed = address.seed});
  const int32_t* token = drawn.data<int32_t>();
  const std::vector<double> logprobs = logprob.to_vector<double>();
  for (size_t i = 0; i < active.size(); ++i) {
    Sequence& s = *active[i];
    s.cached = static_cast<int64_t>(s.out->tokens.size());
    s.out->tokens.push_back(token[i]);
    s.out->logprobs.push_back(logprobs[i]);
    const bool stopped =
        std::find(stop_tokens_.begin(), stop_tokens_.end(), token[i]) != stop_tokens_.end();
    s.out->truncated = !stopped && s.out->completion_length() >= s.limit;
    s.done = stopped || s.out->truncated;
  }
}

}  // namespace cohort
