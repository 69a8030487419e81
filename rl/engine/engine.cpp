#include "rl/engine/engine.h"

#include <bit>
#include <cmath>

#include "core/allocator.h"
#include "core/sizes.h"
#include "kernels/embedding.h"

namespace cohort {
namespace {

// A forward of few tokens costs about as much as one of kMinPrefillTokens: smaller prefills are
// batched with later ones, delayed by at most kMaxPostponedSteps steps.
constexpr int64_t kMinPrefillTokens = 1024, kMaxPostponedSteps = 16;
// The first token of a further completion of a prompt counts as this many prefill tokens.
constexpr int64_t kForkTokens = 64;

// Weight bytes that a decode step reads: all but lookup tables, of which it reads single rows.
int64_t weight_bytes(const Transformer& model) {
  int64_t elements = 0;
  for (const ParameterSpec& spec : describe_parameters(model.config()))
    if (spec.use != ParameterSpec::Use::kLookup) elements += spec.shape.numel();
  return elements * static_cast<int64_t>(dtype_size(model.dtype()));
}

// [n, C]: rows of table [N, C].
Tensor rows_of(const Tensor& table, const std::vector<int32_t>& rows) {
  Tensor out = Tensor::empty({static_cast<int64_t>(rows.size()), table.dim(1)}, table.dtype(),
                             table.device());
  kernels::embedding_forward(
      {.y = out, .table = table, .ids = Tensor::from(rows).to(table.device())});
  return out;
}

// The capacity that completions of a request need.
SlotLimits limits_of(const EngineRequest& request) {
  return {.stop_tokens = static_cast<int64_t>(request.stop_tokens.size()),
          .biases = static_cast<int64_t>(request.logit_bias.size()),
          .penalties = std::any_of(request.completions.begin(), request.completions.end(),
                                   kernels::has_penalty)};
}

KVCacheConfig one_block_cache(const ModelConfig& c, int64_t block_tokens) {
  return {.num_layers = c.num_layers,
          .num_kv_heads = c.num_kv_heads,
          .head_dim = c.head_dim,
          .max_length = c.context,
          .num_blocks = 1,
          .block_tokens = block_tokens};
}

}  // namespace

// A prompt and its blocks in the cache.
struct Engine::Request {
  int64_t id = 0;
  EngineRequest in;
  Sequences completions;
  int64_t unfinished = 0;
  // Held from the prefill of the prompt until its last completion has ended, or until eviction.
  KVCache::Blocks blocks;
  Tensor hidden;         // final hidden states of a prefill [n, C]
  int32_t last_row = 0;  // row of the prompt's last token in `hidden`
  bool is_computed() const { return hidden.defined(); }
  auto prompt_length() const { return static_cast<int64_t>(in.prompt.size()); }
};

struct Engine::Sequence {
  Request* request = nullptr;
  int64_t completion = 0;
  std::vector<int32_t> sampled;  // tokens that the host has read
  int64_t in_flight = 0;         // tokens enqueued and not yet read
  int32_t slot = -1;             // -1: not in the cache
  bool done = false;

  int64_t length() const {
    return request->prompt_length() + static_cast<int64_t>(sampled.size()) + in_flight;
  }
  bool is_full() const { return length() >= request->in.max_length; }
  int32_t token(int64_t position) const {
    const int64_t prompt = request->prompt_length();
    return position < prompt ? request->in.prompt[static_cast<size_t>(position)]
                             : sampled[static_cast<size_t>(position - prompt)];
  }
  // Tokens that must be in the cache before the next one can be sampled, from the prompt's hidden
  // state or from a decode step of the last token.
  int64_t prefill_length() const { return sampled.empty() ? length() : length() - 1; }
  const kernels::SamplingParams& sampling_params() const {
    return request->in.completions[static_cast<size_t>(completion)];
  }
};

// Tokens [next, end) of a sequence are not in the cache yet.
struct Engine::Prefill {
  SequencePtr sequence;
  int64_t next = 0, end = 0;
};

struct Engine::PendingSamples {
  SampledTokens samples;
  Sequences rows;  // null: idle
};

Engine::Engine(const Transformer& model, const EngineConfig& config)
    : model_(model),
      config_(config),
      max_pending_(model.device().is_cuda() ? 1 : 0),
      weight_bytes_(weight_bytes(model)),
      token_bytes_(KVCache::bytes(one_block_cache(model.config(), 1), model.dtype())) {}

Engine::~Engine() = default;

int64_t Engine::submit(EngineRequest in) {
  const auto prompt = static_cast<int64_t>(in.prompt.size());
  COHORT_CHECK(prompt > 0 && prompt < in.max_length && in.max_length <= model_.config().context,
               "[engine] expected a prompt of at least one token that is shorter than max_length, "
               "and max_length of at most ",
               model_.config().context, ", got ", prompt, " tokens and a max_length of ",
               in.max_length);
  for (const int32_t token : in.prompt)
    COHORT_CHECK(token >= 0 && token < model_.config().vocab_size, "[engine] token ", token,
                 " of a prompt is outside the vocabulary of ", model_.config().vocab_size);
  for (const auto& [id, bias] : in.logit_bias)
    COHORT_CHECK(id >= 0 && id < model_.config().vocab_size && !std::isnan(bias) && bias < INFINITY,
                 "[engine] expected biases (finite or -inf) of tokens of the vocabulary, got ",
                 bias, " for token ", id);
  for (const kernels::SamplingParams& params : in.completions) {
    const char* const expected = kernels::invalid_reason(params);
    COHORT_CHECK(expected == nullptr, "[engine] expected ", expected);
  }
  auto request = std::make_shared<Request>();
  request->id = next_request_++;
  request->in = std::move(in);
  for (size_t i = 0; i < request->in.completions.size(); ++i) {
    auto sequence = std::make_shared<Sequence>();
    sequence->request = request.get();
    sequence->completion = static_cast<int64_t>(i);
    request->completions.push_back(sequence);
    waiting_.push_back(sequence);
    ++request->unfinished;
  }
  has_new_requests_ = true;
  if (request->unfinished > 0) requests_[request->id] = request;
  return request->id;
}

void Engine::cancel(int64_t request, int64_t completion) {
  const auto it = requests_.find(request);
  if (it == requests_.end()) return;
  const SequencePtr sequence = it->second->completions.at(static_cast<size_t>(completion));
  if (sequence->done) return;
  stop(*sequence);
  end(sequence);
}

void Engine::cancel_all() {
  pending_.clear();
  for (const auto& [id, request] : decltype(requests_)(requests_))
    for (const SequencePtr& sequence : request->completions) cancel(id, sequence->completion);
}

bool Engine::step() {
  try {
    if (!requests_.empty()) schedule();
  } catch (...) {
    cancel_all();
    throw;
  }
  if (!requests_.empty()) return true;
  if (cache_ != nullptr) cache_->release_to_pool();
  return false;
}

void Engine::schedule() {
  if (prefills_.empty() && running_.empty() && has_new_requests_) ensure_capacity();
  bool admitted = admit();
  while (pending_.size() > max_pending_) collect();
  const bool decoded = decode();
  if (!admitted && !decoded && pending_.empty()) {
    // The cache is full of prompts whose completions wait.
    for (const auto& [id, request] : requests_) evict_prompt(*request);
    admitted = admit();
  }
  COHORT_CHECK(admitted || decoded || !pending_.empty(), "[engine] cannot make progress on ",
               requests_.size(), " requests");
  while (pending_.size() > (admitted || decoded ? max_pending_ : 0)) collect();
}

void Engine::update_peaks() {
  stats_.most_running = std::max(stats_.most_running, static_cast<int64_t>(running_.size()));
  stats_.most_blocks = std::max(stats_.most_blocks, cache_->num_blocks() - cache_->free_blocks());
}

EngineStats Engine::stats() const {
  EngineStats out = stats_;
  out.running = static_cast<int64_t>(running_.size() + prefills_.size());
  out.waiting = static_cast<int64_t>(waiting_.size());
  if (cache_ != nullptr) {
    out.blocks = cache_->num_blocks();
    out.used_blocks = out.blocks - cache_->free_blocks();
  }
  return out;
}

int64_t Engine::cache_bytes() const {
  return cache_ == nullptr ? 0 : KVCache::bytes(cache_->config(), model_.dtype());
}

std::string Engine::cache_summary() const {
  if (cache_ == nullptr) return "none";
  const KVCacheConfig& c = cache_->config();
  return str("up to ", c.num_sequences, " sequences at once, a cache of ",
             c.num_blocks * c.block_tokens, " tokens (", mib(cache_bytes()), ")");
}

// ---- Capacity

SlotLimits Engine::limits_of_waiting() const {
  SlotLimits limits;
  for (const SequencePtr& s : waiting_) limits = limits.with(limits_of(s->request->in));
  return limits;
}

KVCacheConfig Engine::cache_for_waiting() const {
  constexpr int64_t kBlockTokens = 16;
  KVCacheConfig out = one_block_cache(model_.config(), kBlockTokens);
  // Blocks of all waiting sequences together, and of the longest alone. The first completion of a
  // prompt counts the prompt's blocks; the partial last block of a prompt may be held in addition
  // to the copies that its completions own.
  int64_t all = 0, longest = 0;
  for (const SequencePtr& s : waiting_) {
    const int64_t length = ceil_div(s->request->in.max_length, out.block_tokens);
    const int64_t shared = s->completion > 0 ? s->request->prompt_length() / out.block_tokens : -1;
    all += length - shared;
    longest = std::max(longest, length + 1);
  }
  const auto count = static_cast<int64_t>(waiting_.size());
  const int64_t concurrent = config_.concurrent(count);
  // Eight sizes per power of two, so that the next requests are likely to fit the same cache.
  const auto rounded = [](int64_t n) {
    return round_up(n, std::max<int64_t>(1, std::bit_floor(static_cast<uint64_t>(n)) / 8));
  };
  const int64_t useful = rounded(std::max(longest, std::min(all, concurrent * longest)));
  const int64_t allowed =
      config_.max_cache_tokens > 0
          ? config_.max_cache_tokens / out.block_tokens
          : static_cast<int64_t>(config_.memory_fraction *
                                 static_cast<double>(available_memory(model_.device())) /
                                 static_cast<double>(KVCache::bytes(out, model_.dtype())));
  out.num_blocks = std::max(longest, std::min(useful, allowed));
  // Fewer sequences avoid preemptions: each is expected to reach half of its maximum length.
  out.num_sequences = concurrent;
  if (config_.max_concurrent == 0)
    out.num_sequences =
        std::clamp<int64_t>(2 * out.num_blocks * count / std::max<int64_t>(1, all), 1, concurrent);
  return out;
}

void Engine::ensure_capacity() {
  has_new_requests_ = false;
  const SlotLimits limits = limits_of_waiting();
  KVCacheConfig wanted = cache_for_waiting();
  const bool is_enough = cache_ != nullptr && cache_->reclaim() &&
                         cache_->config().num_sequences >= wanted.num_sequences &&
                         cache_->num_blocks() >= wanted.num_blocks;
  if (is_enough && slots_->limits().cover(limits)) return;
  const SlotLimits both = slots_ == nullptr ? limits : limits.with(slots_->limits());
  slots_.reset();
  if (!is_enough) {
    const int64_t sequences = cache_ == nullptr ? 0 : cache_->config().num_sequences;
    for (const auto& [id, request] : requests_) evict_prompt(*request);
    cache_.reset();
    wanted = cache_for_waiting();  // now with the memory of the old cache
    wanted.num_sequences = std::max(wanted.num_sequences, sequences);
    cache_ = std::make_unique<KVCache>(wanted, model_.dtype(), model_.device());
  }
  slots_ = std::make_unique<DecodeSlots>(model_, *cache_, both);
  decode_rows_.clear();
  rows_changed_ = true;
  stopped_slots_.clear();
}

// Requests that do not fit wait until the cache is empty, when ensure_capacity() grows it.
bool Engine::has_capacity_for(const Request& request) const {
  return cache_->blocks_for(request.in.max_length) < cache_->num_blocks() &&
         slots_->limits().cover(limits_of(request.in));
}

// ---- Admission

bool Engine::admit() {
  Sequences ready;
  if (should_admit()) {
    choose_prefills();
    fork_completions(ready);
  }
  const bool forward = !prefills_.empty();
  if (forward) {
    run_prefills(ready);
    fork_completions(ready);
  }
  cache_->upload();
  if (!ready.empty()) start(ready);
  return forward || !ready.empty();
}

bool Engine::should_admit() {
  if (waiting_.empty() || cache_->free_rows() == 0) return false;
  if (running_.empty()) return true;
  int64_t tokens = 0;
  const auto rows = static_cast<size_t>(cache_->free_rows());
  const Request* last = nullptr;
  for (size_t i = 0; i < std::min(rows, waiting_.size()) && tokens < kMinPrefillTokens; ++i) {
    const Sequence& s = *waiting_[i];
    const bool shares_prompt = s.request->is_computed() || s.request == last;
    tokens += shares_prompt ? kForkTokens : s.prefill_length();
    last = s.request;
  }
  if (tokens < kMinPrefillTokens && ++postponed_steps_ < kMaxPostponedSteps) return false;
  postponed_steps_ = 0;
  return true;
}

// Starts prefills of waiting sequences whose prompts are not computed, in order, within the limits
// of rows, blocks, and tokens of one forward.
void Engine::choose_prefills() {
  int64_t tokens = 0, rows = cache_->free_rows();
  std::set<const Request*> started;
  for (const Prefill& p : prefills_) {
    tokens += p.end - p.next;
    started.insert(p.sequence->request);
  }
  bool full = false;
  std::erase_if(waiting_, [&](const SequencePtr& s) {
    Request& request = *s->request;
    full = full || rows-- <= 0 || tokens >= kPrefillTokens || !has_capacity_for(request);
    // Further completions of a prompt wait until its prefill is done.
    if (full || request.is_computed() || started.contains(&request)) return false;
    // One spare block per running sequence, so that growth does not preempt at once.
    const int64_t length = s->prefill_length(),
                  needed = cache_->blocks_for(length) + static_cast<int64_t>(running_.size());
    const bool alone = running_.empty() && prefills_.empty();
    const int32_t row = cache_->acquire();
    if ((!alone && cache_->free_blocks() < needed) || !cache_->reserve(row, length)) {
      cache_->release(row);
      full = true;
      return false;
    }
    s->slot = row;
    started.insert(&request);
    tokens += length;
    prefills_.push_back({.sequence = s, .next = 0, .end = length});
    return true;
  });
}

// One forward of the next tokens of all prefills. Appends the sequences that are ready to decode.
void Engine::run_prefills(Sequences& ready) {
  std::vector<int32_t> tokens, rows, positions;
  struct LastToken {
    Request* request;
    int64_t length;
    int32_t slot, index;
  };
  std::vector<LastToken> last_tokens;
  for (Prefill& p : prefills_) {
    const Sequence& s = *p.sequence;
    for (; p.next < p.end && static_cast<int64_t>(tokens.size()) < kPrefillTokens; ++p.next) {
      tokens.push_back(s.token(p.next));
      rows.push_back(s.slot);
      positions.push_back(static_cast<int32_t>(p.next));
      if (p.next + 1 == s.request->prompt_length() && !s.request->is_computed())
        last_tokens.push_back(
            {s.request, p.next + 1, s.slot, static_cast<int32_t>(tokens.size()) - 1});
    }
    if (p.next == p.end) ready.push_back(p.sequence);
  }
  std::erase_if(prefills_, [](const Prefill& p) { return p.next == p.end; });
  cache_->upload();
  const auto upload = [&](const std::vector<int32_t>& values) {
    return Tensor::from(values).to(model_.device());
  };
  const Tensor hidden =
      model_.forward_cached(upload(tokens), upload(rows), upload(positions), *cache_);
  stats_.prefilled_tokens += static_cast<int64_t>(tokens.size());
  if (last_tokens.empty()) return;
  std::vector<int32_t> indices;
  for (const LastToken& last : last_tokens) indices.push_back(last.index);
  const Tensor last_hidden = rows_of(hidden, indices);
  for (size_t i = 0; i < last_tokens.size(); ++i) {
    const LastToken& last = last_tokens[i];
    last.request->hidden = last_hidden;
    last.request->last_row = static_cast<int32_t>(i);
    last.request->blocks = cache_->hold(last.slot, last.length);
  }
}

// Admits waiting completions of computed prompts: each shares the prompt's blocks.
void Engine::fork_completions(Sequences& ready) {
  bool full = false;
  std::erase_if(waiting_, [&](const SequencePtr& s) {
    Request& request = *s->request;
    full = full || cache_->free_rows() == 0;
    if (full || !request.is_computed()) return false;
    const int64_t prompt = request.prompt_length(), length = s->prefill_length();
    const int32_t row = cache_->acquire();
    if (!cache_->start_with(row, request.blocks, prompt) || !cache_->reserve(row, length)) {
      cache_->release(row);
      full = true;
      return false;
    }
    s->slot = row;
    if (length > prompt)
      prefills_.push_back({.sequence = s, .next = prompt, .end = length});
    else
      ready.push_back(s);
    return true;
  });
}

void Engine::start(const Sequences& ready) {
  slots_->stop(std::exchange(stopped_slots_, {}));
  std::vector<SlotStart> starts;
  for (const SequencePtr& s : ready) {
    const Request& request = *s->request;
    starts.push_back({.slot = s->slot,
                      .prompt = request.in.prompt,
                      .sampled = s->sampled,
                      .max_length = request.in.max_length,
                      .params = s->sampling_params(),
                      .stop_tokens = request.in.stop_tokens,
                      .logit_bias = &request.in.logit_bias});
    running_.push_back(s);
  }
  slots_->start(starts);
  rows_changed_ = true;
  update_peaks();
  sample_first_tokens(ready);
}

void Engine::sample_first_tokens(const Sequences& ready) {
  // The prompts of one forward have their hidden states in one tensor.
  std::map<const void*, Sequences> by_tensor;
  for (const SequencePtr& s : ready)
    if (s->sampled.empty()) by_tensor[s->request->hidden.raw()].push_back(s);
  for (auto& [tensor, sequences] : by_tensor) {
    std::vector<int32_t> rows, slots;
    for (const SequencePtr& s : sequences) {
      rows.push_back(s->request->last_row);
      slots.push_back(s->slot);
      ++s->in_flight;
    }
    const Tensor x = rows_of(sequences[0]->request->hidden, rows);
    pending_.push_back({.samples = slots_->sample(x, slots), .rows = std::move(sequences)});
  }
}

// ---- Decoding

bool Engine::decode() {
  // Each sequence needs a cache entry for its last token, whose keys and values this step computes.
  for (size_t i = 0; i < running_.size();) {
    Sequence& s = *running_[i];
    if (s.is_full() || cache_->reserve(s.slot, s.length())) {
      ++i;
    } else {
      reclaim_blocks();
      i = 0;
    }
  }
  const auto unfinished = std::count_if(running_.begin(), running_.end(),
                                        [](const SequencePtr& s) { return !s->is_full(); });
  if (unfinished == 0) return false;
  update_peaks();
  cache_->upload();
  slots_->stop(std::exchange(stopped_slots_, {}));
  // Rows of ended sequences are idle; the rows are chosen again when a smaller step is enough.
  if (rows_changed_ || slots_->rows_for(running_.size()) < slots_->rows_for(decode_rows_.size())) {
    decode_rows_ = running_;
    std::vector<int32_t> slots;
    for (const SequencePtr& s : decode_rows_) slots.push_back(s->slot);
    slots_->choose(slots);
    rows_changed_ = false;
  }
  PendingSamples pending{.samples = slots_->decode(), .rows = decode_rows_};
  stats_.decode_bytes += weight_bytes_;
  for (SequencePtr& s : pending.rows) {
    if (s->done || s->is_full()) {
      s = nullptr;
      continue;
    }
    stats_.decode_bytes += token_bytes_ * s->length();
    ++s->in_flight;
  }
  pending_.push_back(std::move(pending));
  ++stats_.decode_steps;
  return true;
}

// Called when the cache is full. Frees, in this order: a prompt none of whose completions is in the
// cache, the blocks of ended sequences, the youngest sequence.
void Engine::reclaim_blocks() {
  for (const auto& [id, request] : requests_) {
    const bool used = std::any_of(request->completions.begin(), request->completions.end(),
                                  [](const SequencePtr& s) { return s->slot >= 0; });
    if (!used && request->is_computed()) return evict_prompt(*request);
  }
  // Sequences may have ended in steps that the host has not read yet.
  if (!pending_.empty()) {
    while (!pending_.empty()) collect();
    return;
  }
  if (!prefills_.empty()) {
    const SequencePtr youngest = prefills_.back().sequence;
    prefills_.pop_back();
    return preempt(youngest);
  }
  COHORT_CHECK(running_.size() > 1, "[engine] a single sequence has filled the cache of ",
               cache_->num_blocks(), " blocks");
  const SequencePtr youngest = running_.back();
  running_.pop_back();
  preempt(youngest);
}

void Engine::preempt(const SequencePtr& sequence) {
  stop(*sequence);
  waiting_.push_front(sequence);
  ++stats_.preemptions;
}

// Removes a sequence from the cache that the device would otherwise continue.
void Engine::stop(Sequence& sequence) {
  if (sequence.slot < 0) return;
  stopped_slots_.push_back(sequence.slot);
  rows_changed_ = true;
  release_row(sequence);
}

void Engine::release_row(Sequence& sequence) {
  if (sequence.slot >= 0) cache_->release(std::exchange(sequence.slot, -1));
}

void Engine::evict_prompt(Request& request) {
  if (cache_ != nullptr) cache_->release_blocks(std::exchange(request.blocks, {}));
  request.hidden = Tensor();
}

// ---- Results

void Engine::collect() {
  PendingSamples pending = std::move(pending_.front());
  pending_.pop_front();
  const std::vector<int32_t> tokens = pending.samples.tokens.wait<int32_t>();
  const std::vector<double> statistics = pending.samples.statistics.wait<double>();
  const size_t n = tokens.size();
  for (size_t i = 0; i < pending.rows.size(); ++i) {
    const SequencePtr& s = pending.rows[i];
    if (s == nullptr || s->done) continue;
    --s->in_flight;
    append_token(s, {.request = s->request->id,
                     .completion = s->completion,
                     .token = tokens[i],
                     .logprob = statistics[i],
                     .entropy = statistics[n + i],
                     .truncated_mass = statistics[2 * n + i]});
  }
}

void Engine::append_token(const SequencePtr& s, EngineToken token) {
  if (token.token < 0)
    throw NonFiniteError(str("[engine] request ", token.request, ", completion ", token.completion,
                             ", position ", s->length() - s->in_flight,
                             ": the model's logits hold NaN or infinity"));
  s->sampled.push_back(token.token);
  ++stats_.decoded_tokens;
  const std::vector<int32_t>& stops = s->request->in.stop_tokens;
  // The device applies the same rule (kernels/decode.h).
  if (std::find(stops.begin(), stops.end(), token.token) != stops.end())
    token.end = EngineToken::End::kStopToken;
  else if (s->is_full() && s->in_flight == 0)
    token.end = EngineToken::End::kLength;
  tokens_.push_back(token);
  if (token.end != EngineToken::End::kNone) end(s);
}

void Engine::end(const SequencePtr& sequence) {
  sequence->done = true;
  std::erase(waiting_, sequence);
  std::erase(running_, sequence);
  std::erase_if(prefills_, [&](const Prefill& p) { return p.sequence == sequence; });
  release_row(*sequence);
  Request& request = *sequence->request;
  if (--request.unfinished > 0) return;
  evict_prompt(request);
  requests_.erase(request.id);
}

}  // namespace cohort
