#include "rl/engine/engine.h"

#include <cmath>

#include "core/log.h"
#include "core/progress.h"
#include "core/sizes.h"
#include "kernels/decode.h"
#include "kernels/embedding.h"

namespace cohort {
namespace {

// Weight bytes that a decode step reads: all but lookup tables, of which it reads single rows.
int64_t weight_bytes(const Transformer& model) {
  int64_t bytes = 0;
  for (const NamedParameter& p : model.parameters())
    if (p.use != ParameterUse::kLookup)
      bytes += p.quantized.defined() ? p.quantized.nbytes() : p.value.nbytes();
  return bytes;
}

// [n, C]: rows of table [N, C].
Tensor rows_of(const Tensor& table, const std::vector<int32_t>& rows) {
  Tensor out = Tensor::empty({static_cast<int64_t>(rows.size()), table.dim(1)}, table.dtype(),
                             table.device());
  kernels::embedding_forward(
      {.y = out, .table = table, .ids = Tensor::from(rows).to(table.device())});
  return out;
}

}  // namespace

Engine::Engine(const Transformer& model, const EngineConfig& config)
    : model_(model),
      config_(config),
      max_pending_(model.device().is_cuda() ? 1 : 0),
      weight_bytes_(weight_bytes(model)),
      block_bytes_(std::max<int64_t>(1, block_bytes(model.config(), model.cache_dtype()))),
      state_bytes_(state_bytes(model.config(), model.cache_dtype())),
      scheduler_(config, static_cast<double>(state_bytes_) / static_cast<double>(block_bytes_)) {}

int64_t Engine::submit(EngineRequest in) {
  model_.config().require_decoder();
  const auto prompt = static_cast<int64_t>(in.prompt.size());
  const int64_t longest = std::max(in.max_length, in.session_length);
  COHORT_CHECK(prompt > 0 && prompt < in.max_length && longest <= model_.config().context,
               "[engine] expected a prompt of at least one token that is shorter than max_length, "
               "and max_length of at most ",
               model_.config().context, ", got ", prompt, " tokens and a max_length of ", longest);
  for (const int32_t token : in.prompt)
    COHORT_CHECK(token >= 0 && token < model_.config().vocab_size, "[engine] token ", token,
                 " of a prompt is outside the vocabulary of ", model_.config().vocab_size);
  for (const auto& [id, bias] : in.logit_bias)
    COHORT_CHECK(id >= 0 && id < model_.config().vocab_size && !std::isnan(bias) && bias < INFINITY,
                 "[engine] expected biases (finite or -inf) of tokens of the vocabulary, got ",
                 bias, " for token ", id);
  COHORT_CHECK(in.adapter >= 0 && in.adapter < model_.config().lora.slots,
               "[engine] expected an adapter below ", model_.config().lora.slots, ", got ",
               in.adapter);
  for (const kernels::SamplingParams& params : in.completions) {
    const char* const expected = kernels::invalid_reason(params);
    COHORT_CHECK(expected == nullptr, "[engine] expected ", expected);
  }
  has_new_requests_ = true;
  return scheduler_.submit(std::move(in));
}

void Engine::extend(int64_t request, int64_t completion, std::span<const int32_t> tokens,
                    int64_t max_length) {
  for (const int32_t token : tokens)
    COHORT_CHECK(token >= 0 && token < model_.config().vocab_size, "[engine] token ", token,
                 " of an observation is outside the vocabulary of ", model_.config().vocab_size);
  scheduler_.extend(request, completion, tokens, max_length);
}

void Engine::cancel_all() {
  pending_.clear();
  scheduler_.cancel_all();
}

bool Engine::step() {
  try {
    try {
      if (scheduler_.has_work()) run_step();
    } catch (const OutOfMemoryError& e) {
      shrink(e);
    }
  } catch (...) {
    cancel_all();
    throw;
  }
  if (scheduler_.has_work()) return true;
  if (!scheduler_.requests().empty()) return false;
  prompts_.clear();
  if (cache_ != nullptr) cache_->release_to_pool();
  return false;
}

void Engine::run_step() {
  if (scheduler_.is_idle() && std::exchange(has_new_requests_, false)) ensure_capacity();
  bool progress = admit();
  collect(max_pending_);
  progress = decode() || progress;
  if (!progress && pending_.empty()) {
    // The cache is full of prompts whose completions wait.
    scheduler_.evict_all();
    progress = admit();
  }
  COHORT_CHECK(progress || !pending_.empty(), "[engine] cannot make progress on ",
               scheduler_.requests().size(), " requests");
  collect(progress ? max_pending_ : 0);
}

// Prepares the next step, after one that has run out of memory, to need less of it.
void Engine::shrink(const OutOfMemoryError& error) {
  scheduler_.preempt_all();
  drop_cache();
  if (scheduler_.requests().empty()) return;
  if (!scheduler_.shrink(capacity_))
    throw OutOfMemoryError(str(error.what(), "; there is no memory for a cache of ",
                               capacity_.num_blocks * KVCacheConfig::kBlockTokens,
                               " tokens and one sequence; hint: lower max_completion_length, "
                               "rollout.memory_fraction or max_concurrent"));
  has_new_requests_ = true;
  const Scheduler::Capacity next = scheduler_.wanted_capacity(allowed_blocks());
  const bool is_first = !std::exchange(has_reported_shrinking_, true);
  logging::write(
      is_first ? logging::Level::kWarn : logging::Level::kDebug,
      str("rollouts: out of memory with a cache of ",
          capacity_.num_blocks * KVCacheConfig::kBlockTokens, " tokens; continuing with at most ",
          next.num_blocks * KVCacheConfig::kBlockTokens, " tokens and ", next.num_sequences,
          " sequences at once (", error.what(), ")"));
}

void Engine::drop_cache() {
  pending_.clear();
  prompts_.clear();
  scheduler_.set_capacity(nullptr, {});
  slots_.reset();
  cache_.reset();
  allocator(model_.device()).release_cached();
}

void Engine::release_cache() {
  COHORT_CHECK(scheduler_.requests().empty(),
               "[engine] the cache of unfinished requests cannot be released");
  drop_cache();
}

EngineStats Engine::stats() const {
  EngineStats out{scheduler_.stats()};
  out.decode_bytes = weight_bytes_ * out.decode_steps;
  for (const auto& [position, count] : out.decoded_at)
    out.decode_bytes += count * (block_bytes_ / KVCacheConfig::kBlockTokens * (position + 1) +
                                 state_bytes_read(model_.config(), model_.cache_dtype(), position));
  return out;
}

int64_t Engine::cache_bytes() const {
  return cache_ == nullptr ? 0 : KVCache::bytes(cache_->config(), model_.cache_dtype());
}

std::string Engine::cache_summary() const {
  if (cache_ == nullptr) return "none";
  const KVCacheConfig& c = cache_->config();
  return str("up to ", c.num_sequences, " sequences at once, a cache of ",
             c.num_blocks * c.block_tokens, " tokens (", mib(cache_bytes()), ")");
}

int64_t Engine::allowed_blocks() const {
  if (config_.max_cache_tokens > 0) return config_.max_cache_tokens / KVCacheConfig::kBlockTokens;
  return static_cast<int64_t>(config_.memory_fraction *
                              static_cast<double>(available_memory(model_.device())) /
                              static_cast<double>(block_bytes_));
}

// Updates may move weights (trainers/sharded_weights.h).
static std::vector<const void*> addresses_of(const Transformer& model) {
  std::vector<const void*> out;
  for (const NamedParameter& p : model.parameters())
    out.push_back(p.quantized.defined() ? p.quantized.values.raw() : p.value.raw());
  return out;
}

void Engine::ensure_capacity() {
  const Scheduler::Capacity wanted = scheduler_.wanted_capacity(allowed_blocks());
  const bool is_kept = cache_ != nullptr && !cache_->reclaim();
  if (is_kept && !std::exchange(has_reported_kept_memory_, true))
    logging::warn("rollouts: the memory of the cache (", mib(cache_bytes()),
                  ") is in use by what was allocated since the last rollout, and another cache is "
                  "allocated beside it");
  const bool is_enough = cache_ != nullptr && !is_kept &&
                         cache_->config().num_sequences >= wanted.num_sequences &&
                         cache_->num_blocks() >= wanted.num_blocks;
  // Recorded steps hold the addresses of weights.
  std::vector<const void*> weights = addresses_of(model_);
  const bool has_moved = weights != weights_;
  weights_ = std::move(weights);
  if (is_enough && !has_moved && slots_ != nullptr && slots_->limits().cover(wanted.limits)) return;
  const SlotLimits limits =
      slots_ == nullptr ? wanted.limits : wanted.limits.with(slots_->limits());
  slots_.reset();
  if (!is_enough) {
    // Without states, a sequence takes next to no memory, and their number is kept.
    const int64_t sequences =
        cache_ == nullptr || state_bytes_ > 0 ? 0 : cache_->config().num_sequences;
    scheduler_.set_capacity(nullptr, {});
    cache_.reset();
    capacity_ = scheduler_.wanted_capacity(allowed_blocks());  // with the old cache's memory
    capacity_.num_sequences = std::max(capacity_.num_sequences, sequences);
    cache_ = std::make_unique<KVCache>(
        cache_config(model_.config(), capacity_.num_sequences, capacity_.num_blocks),
        model_.cache_dtype(), model_.device());
  }
  slots_ = std::make_unique<DecodeSlots>(model_, *cache_, limits);
  scheduler_.set_capacity(cache_.get(), limits);
}

// ---- Steps

bool Engine::admit() {
  const std::vector<Scheduler::Chunk> chunks = scheduler_.schedule_prefill();
  if (!chunks.empty()) prefill(chunks);
  const Sequences starts = scheduler_.schedule_starts(chunks);
  cache_->upload();
  if (!starts.empty()) {
    set_adapters(starts);
    slots_->stop(scheduler_.take_stopped_slots());
    slots_->start(starts);
    sample_first_tokens(starts);
  }
  return !chunks.empty() || !starts.empty();
}

// Says which adapter the cache's rows of sequences have.
void Engine::set_adapters(const Sequences& sequences) {
  if (model_.config().lora.slots == 1) return;
  std::vector<int32_t> rows, adapters;
  for (const Scheduler::SequencePtr& s : sequences) {
    rows.push_back(s->slot);
    adapters.push_back(s->request->in.adapter);
  }
  Tensor table = cache_->adapters();
  kernels::set_elements(
      {table, Tensor::from(rows).to(model_.device()), Tensor::from(adapters).to(model_.device())});
}

// One forward of all chunks, which keeps the hidden states of the prompts that they complete.
void Engine::prefill(const std::vector<Scheduler::Chunk>& chunks) {
  std::vector<int32_t> tokens, slots, positions, last_rows;
  std::vector<int64_t> completed;
  Sequences sequences;
  for (const Scheduler::Chunk& chunk : chunks) {
    const Scheduler::Sequence& s = *chunk.sequence;
    sequences.push_back(chunk.sequence);
    if (chunk.completes_prompt()) {
      completed.push_back(s.request->id);
      last_rows.push_back(static_cast<int32_t>(static_cast<int64_t>(tokens.size()) +
                                               s.request->prompt_length() - 1 - chunk.begin));
    }
    for (int64_t position = chunk.begin; position < chunk.end; ++position) {
      tokens.push_back(s.token(position));
      slots.push_back(s.slot);
      positions.push_back(static_cast<int32_t>(position));
    }
  }
  cache_->upload();
  set_adapters(sequences);
  const auto upload = [&](const std::vector<int32_t>& values) {
    return Tensor::from(values).to(model_.device());
  };
  const Tensor hidden =
      model_.forward_cached(upload(tokens), upload(slots), upload(positions), *cache_);
  if (completed.empty()) return;
  std::erase_if(prompts_, [&](const auto& p) { return !scheduler_.requests().contains(p.first); });
  const Tensor last_hidden = rows_of(hidden, last_rows);
  for (size_t i = 0; i < completed.size(); ++i)
    prompts_[completed[i]] = {last_hidden, static_cast<int32_t>(i), next_forward_};
  ++next_forward_;
}

// The prompts of one forward have their hidden states in one tensor, and are sampled together.
void Engine::sample_first_tokens(const Sequences& sequences) {
  std::map<int64_t, Sequences> by_forward;
  for (const Scheduler::SequencePtr& s : sequences)
    if (s->output.empty()) by_forward[prompts_.at(s->request->id).forward].push_back(s);
  for (const auto& [forward, group] : by_forward) {
    std::vector<int32_t> rows;
    for (const Scheduler::SequencePtr& s : group) rows.push_back(prompts_.at(s->request->id).row);
    const Tensor& hidden = prompts_.at(group[0]->request->id).hidden;
    pending_.push_back(slots_->sample(rows_of(hidden, rows), group));
  }
}

bool Engine::decode() {
  Scheduler::Decode decode;
  while ((decode = scheduler_.schedule_decode(pending_.size())) == Scheduler::Decode::kReadTokens)
    collect(0);
  if (decode == Scheduler::Decode::kIdle) return false;
  cache_->upload();
  slots_->stop(scheduler_.take_stopped_slots());
  pending_.push_back(slots_->decode(scheduler_.running()));
  return true;
}

void Engine::collect(size_t max_pending) {
  while (pending_.size() > max_pending) {
    SampledTokens step = std::move(pending_.front());
    pending_.pop_front();
    const std::vector<int32_t> tokens = step.tokens.wait<int32_t>();
    note_progress();
    const std::vector<double> statistics = step.statistics.wait<double>();
    const size_t n = tokens.size();
    for (size_t i = 0; i < step.sequences.size(); ++i) {
      // The sequence of an idle row is done: its last token was in an earlier step.
      const Scheduler::SequencePtr& s = step.sequences[i];
      if (s->done) continue;
      EngineToken token{.request = s->request->id,
                        .completion = s->completion,
                        .token = tokens[i],
                        .logprob = statistics[i],
                        .entropy = statistics[n + i],
                        .truncated_mass = statistics[2 * n + i],
                        .sampling_logprob = statistics[3 * n + i]};
      if (token.token < 0)
        throw NonFiniteError(str("[engine] request ", token.request, ", completion ",
                                 token.completion, ", position ", s->length() - s->in_flight,
                                 ": the model's logits hold NaN or infinity"));
      token.end = scheduler_.append(s, token.token);
      tokens_.push_back(token);
    }
  }
}

}  // namespace cohort
