// The rollout loop. Every active sequence brings the tokens that the cache has not seen yet and
// gets one new token. While prompts are admitted, one forward serves prefills and decodes alike;
// between admissions a decode step runs on tensors that stay on the device, so that it can be
// replayed.
#include "rl/rollout.h"

#include <algorithm>
#include <map>

#include "core/log.h"
#include "core/replay.h"
#include "kernels/decode.h"
#include "kernels/embedding.h"
#include "kernels/sampling.h"

namespace cohort {

namespace {

// The purpose of rng_stream() for sampled tokens.
constexpr uint64_t kSamplePurpose = 3;

// Rows of the decoder that serves `count` sequences. A CUDA graph has a fixed number of rows, so
// there are a few sizes, with idle rows to fill them; no row depends on another.
int64_t decoder_rows(int64_t count, Device device) {
  if (device.is_cpu()) return count;
  if (count > 64) return (count + 63) / 64 * 64;
  int64_t rows = 1;
  while (rows < count) rows *= 2;
  return rows;
}

// The text of the ids from `begin` on.
std::string text_after(const Tokenizer& tokenizer, std::span<const int32_t> ids, size_t begin) {
  StreamDecoder text(tokenizer, ids.first(begin));
  std::string out;
  for (size_t i = begin; i < ids.size(); ++i) out += text.push(ids[i]);
  return out + text.finish();
}

}  // namespace

void check_stop_tokens(const SamplingConfig& config, int64_t vocab_size) {
  for (const int64_t id : config.stop_tokens)
    if (id >= vocab_size)
      throw InputError(str("stop_tokens: ", id, " is outside the vocabulary of ", vocab_size,
                           "; hint: ids are 0 to ", vocab_size - 1));
}

struct Sampler::Sequence {
  Trajectory* out = nullptr;
  int64_t max_length = 0;  // prompt and completion
  kernels::DrawParams draw;
  int64_t cached = 0;  // tokens the cache holds
  int32_t row = -1;    // of the cache; -1: waiting
  bool done = false;
  int64_t length() const { return static_cast<int64_t>(out->tokens.size()); }
};

// What a forward of the cache needs of the tokens that it does not hold yet, and the draws after
// the last of each sequence. A sequence that is decoded has one such token.
struct Sampler::Inputs {
  std::vector<int32_t> tokens, rows, positions;  // per token
  std::vector<kernels::DrawParams> params;       // per sequence
  std::vector<int32_t> slots;                    // of params
  std::vector<int64_t> indices;                  // of the draws
  std::vector<int32_t> last;                     // per sequence: its last token
  explicit Inputs(const std::vector<Sequence*>& active) {
    for (const Sequence* s : active) {
      for (int64_t p = s->cached; p < s->length(); ++p) {
        tokens.push_back(s->out->tokens[static_cast<size_t>(p)]);
        rows.push_back(s->row);
        positions.push_back(static_cast<int32_t>(p));
      }
      last.push_back(static_cast<int32_t>(tokens.size() - 1));
      slots.push_back(static_cast<int32_t>(params.size()));
      params.push_back(s->draw);
      indices.push_back(s->length());
    }
  }
};

// A token for each of n sequences: its id, and the statistics of its draw as the rows of one
// tensor, so that one copy brings them to the host.
struct Sampler::Drawn {
  Tensor tokens;      // [n] i32
  Tensor statistics;  // [3, n]: log-probs, entropies, what was cut
  Drawn(int64_t n, const Transformer& model)
      : tokens(Tensor::zeros({n}, DType::kI32, model.device())),  // idle rows stay so
        statistics(Tensor::empty({3, n}, accumulate_dtype(model.dtype()), model.device())) {}
};

// One token for each of up to `rows` sequences. Its tensors hold the step's inputs, which the step
// itself moves on to the next one; they are set again only when other sequences come to be decoded.
class Sampler::Decoder {
 public:
  Decoder(const Sampler& sampler, KVCache& cache, int32_t idle_row, int64_t rows)
      : rows_(rows),
        idle_row_(idle_row),
        device_(sampler.model_.device()),
        tokens_(Tensor::zeros({rows}, DType::kI32, device_)),
        cache_rows_(Tensor::zeros({rows}, DType::kI32, device_)),
        positions_(Tensor::zeros({rows}, DType::kI32, device_)),
        slots_(Tensor::full({rows}, -1, DType::kI32, device_)),
        indices_(Tensor::zeros({rows}, DType::kI64, device_)),
        drawn_(rows, sampler.model_),
        state_{.params = Tensor::zeros({rows, sizeof(kernels::DrawParams)}, DType::kU8, device_)},
        replay_(device_, [this, &sampler, &cache] {
          const Tensor hidden =
              sampler.model_.forward_cached(tokens_, cache_rows_, positions_, cache);
          sampler.draw(drawn_, hidden, state_, slots_, indices_);
          tokens_.copy_(drawn_.tokens);
          kernels::increment(positions_);
          kernels::increment(indices_);
        }) {}

  // `in`: of one token of each sequence.
  void set(Inputs in) {
    const auto n = static_cast<size_t>(rows_);
    in.rows.resize(n, idle_row_);
    for (auto* values : {&in.tokens, &in.positions}) values->resize(n);
    in.slots.resize(n, -1);
    in.indices.resize(n);
    in.params.resize(n);
    tokens_.copy_(Tensor::from(in.tokens));
    cache_rows_.copy_(Tensor::from(in.rows));
    positions_.copy_(Tensor::from(in.positions));
    state_.params.copy_(kernels::pack_params(in.params));
    slots_.copy_(Tensor::from(in.slots));
    indices_.copy_(Tensor::from(in.indices));
  }
  void run() { replay_.run(); }
  const Drawn& drawn() const { return drawn_; }

 private:
  const int64_t rows_;
  const int32_t idle_row_;
  const Device device_;
  Tensor tokens_, cache_rows_, positions_, slots_, indices_;
  Drawn drawn_;
  kernels::SamplingState state_;
  Replay replay_;
};

// One call of sample().
struct Sampler::Session {
  KVCache cache;
  const SampleCallbacks& callbacks;
  const int32_t idle_row = cache.acquire();  // of the cache: decoders' idle rows write there
  std::vector<Sequence> sequences;
  size_t next = 0;                                       // of the sequences that wait
  std::vector<Sequence*> active;                         // in the cache
  std::map<int64_t, std::unique_ptr<Decoder>> decoders;  // by number of rows
  Decoder* current = nullptr;  // whose tensors hold the next step of exactly `active`
};

Sampler::Sampler(const Transformer& model, const Tokenizer& tokenizer, const SamplingConfig& config)
    : model_(model), tokenizer_(tokenizer), config_(config), stop_tokens_(tokenizer.stop_ids()) {
  check_stop_tokens(config, model.config().vocab_size);
  for (const int64_t id : config.stop_tokens) stop_tokens_.push_back(static_cast<int32_t>(id));
}

std::vector<Trajectory> Sampler::start(std::span<const Example> prompts, int64_t num_generations,
                                       const SampleAddress& address) const {
  const int64_t context = model_.config().context;
  std::vector<Trajectory> out;
  for (size_t i = 0; i < prompts.size(); ++i) {
    const int64_t index =
        address.prompt_indices.empty() ? static_cast<int64_t>(i) : address.prompt_indices.at(i);
    Trajectory trajectory{.tokens = encode_prompt(prompts[i], tokenizer_), .group = index};
    const size_t length = trajectory.tokens.size();
    if (length == 0)
      throw InputError(
          str("prompt ", index, " is empty; a completion needs at least one token to follow"));
    if (static_cast<int64_t>(length) >= context)
      throw InputError(
          str("prompt ", index, " has ", length, " tokens, the model's context is ", context,
              ": no room for a completion; hint: a larger model.context or shorter prompts"));
    trajectory.loss_mask.assign(length, 0);
    trajectory.logprobs.assign(length, 0);
    trajectory.prompt_length = static_cast<int64_t>(length);
    for (int64_t g = 0; g < num_generations; ++g) {
      trajectory.index = index * num_generations + g;
      out.push_back(trajectory);
    }
  }
  return out;
}

std::vector<Trajectory> Sampler::sample(std::span<const Example> prompts, int64_t num_generations,
                                        const SampleAddress& address,
                                        const SampleCallbacks& callbacks) const {
  std::vector<Trajectory> trajectories = start(prompts, num_generations, address);
  if (trajectories.empty()) return trajectories;
  const ModelConfig& c = model_.config();
  std::vector<Sequence> sequences;
  int64_t longest = 1;
  for (Trajectory& t : trajectories) {
    const auto sample = static_cast<uint64_t>(t.group) << 24 |
                        static_cast<uint64_t>(t.index - t.group * num_generations);
    sequences.push_back(
        {.out = &t,
         .max_length = config_.max_length(t.prompt_length, c.context),
         .draw = {
             .temperature = config_.temperature,
             .top_k = config_.top_k,
             .top_p = config_.top_p,
             .seed = address.seed,
             .stream = rng_stream(kSamplePurpose, static_cast<uint64_t>(address.step), sample)}});
    longest = std::max(longest, sequences.back().max_length);
  }
  const KVCacheConfig rows{
      .num_layers = c.num_layers,
      .num_kv_heads = c.num_kv_heads,
      .head_dim = c.head_dim,
      .num_sequences = kIdleSequences + config_.concurrent(static_cast<int64_t>(sequences.size())),
      .max_length = longest};
  Session session{.cache = KVCache(rows, model_.dtype(), model_.device()),
                  .callbacks = callbacks,
                  .sequences = std::move(sequences)};
  session.cache.reserve(session.idle_row, 1);
  while (session.next < session.sequences.size() || !session.active.empty()) {
    const size_t waiting = session.next;
    admit(session);
    if (session.next > waiting)
      prefill_step(session);
    else
      decode_step(session);
    const size_t before = session.active.size();
    for (const Sequence* sequence : session.active) {
      if (!sequence->done) continue;
      session.cache.release(sequence->row);
      if (callbacks.on_finished) callbacks.on_finished(*sequence->out);
    }
    std::erase_if(session.active, [](const Sequence* s) { return s->done; });
    if (session.active.size() != before) session.current = nullptr;
  }
  return trajectories;
}

// Takes in waiting sequences, as many as there is room for.
void Sampler::admit(Session& session) const {
  int64_t prefill = 0;
  while (session.next < session.sequences.size() && session.cache.free_rows() > 0 &&
         prefill < kPrefillTokens) {
    Sequence& sequence = session.sequences[session.next++];
    sequence.row = session.cache.acquire();
    session.cache.reserve(sequence.row, sequence.max_length);
    prefill += sequence.length();
    session.active.push_back(&sequence);
  }
  session.cache.upload();
}

void Sampler::draw(Drawn& out, const Tensor& hidden, kernels::SamplingState& state,
                   const Tensor& slots, const Tensor& indices) const {
  kernels::Draws draws{.tokens = out.tokens,
                       .logprob = out.statistics.select(0, 0),
                       .entropy = out.statistics.select(0, 1),
                       .cut = out.statistics.select(0, 2)};
  kernels::head_sample({.out = draws,
                        .state = state,
                        .x = hidden,
                        .w = model_.head().value(),
                        .slots = slots,
                        .rng_index = indices});
}

void Sampler::prefill_step(Session& session) const {
  const Inputs in(session.active);
  const Device device = model_.device();
  const auto upload = [&](const auto& values) { return Tensor::from(values).to(device); };
  const Tensor hidden = model_.forward_cached(upload(in.tokens), upload(in.rows),
                                              upload(in.positions), session.cache);
  const auto n = static_cast<int64_t>(session.active.size());
  Tensor x = Tensor::empty({n, hidden.dim(1)}, hidden.dtype(), device);
  kernels::embedding_forward({.y = x, .table = hidden, .ids = upload(in.last)});
  Drawn drawn(n, model_);
  kernels::SamplingState state{.params = kernels::pack_params(in.params).to(device)};
  draw(drawn, x, state, upload(in.slots), upload(in.indices));
  session.current = nullptr;
  append_tokens(session, drawn);
}

void Sampler::decode_step(Session& session) const {
  if (session.current == nullptr) {
    const int64_t rows = decoder_rows(static_cast<int64_t>(session.active.size()), model_.device());
    std::unique_ptr<Decoder>& decoder = session.decoders[rows];
    if (decoder == nullptr)
      decoder = std::make_unique<Decoder>(*this, session.cache, session.idle_row, rows);
    decoder->set(Inputs(session.active));
    session.current = decoder.get();
  }
  session.current->run();
  append_tokens(session, session.current->drawn());
}

// Hands each active sequence its token: token i is that of session.active[i].
void Sampler::append_tokens(Session& session, const Drawn& drawn) const {
  const std::vector<int32_t> tokens = drawn.tokens.to_vector<int32_t>();
  const std::vector<double> statistics = drawn.statistics.to_vector<double>();
  const size_t n = tokens.size();
  for (size_t i = 0; i < session.active.size(); ++i) {
    Sequence& s = *session.active[i];
    Trajectory& out = *s.out;
    const int32_t token = tokens[i];
    if (token < 0)
      throw NonFiniteError(str("[sampler] prompt ", out.group, ", position ", s.length(),
                               ": the model's logits hold NaN or infinity"));
    s.cached = s.length();
    out.append_drawn(token, statistics[i]);
    out.entropy += statistics[n + i];
    out.cut += statistics[2 * n + i];
    const bool stopped =
        std::find(stop_tokens_.begin(), stop_tokens_.end(), token) != stop_tokens_.end();
    const bool cancelled = session.callbacks.on_token && !session.callbacks.on_token(out);
    s.done = stopped || cancelled || s.length() >= s.max_length;
    if (!s.done) continue;
    const auto prompt = static_cast<size_t>(out.prompt_length);
    if (!stopped)
      out.stop_reason = s.length() < s.max_length ? StopReason::kCancelled
                        : s.length() - out.prompt_length >= config_.max_completion_length
                            ? StopReason::kLength
                            : StopReason::kContext;
    out.text = text_after(tokenizer_, out.tokens, prompt);
  }
}

}  // namespace cohort
