#include "rl/engine/scheduler.h"

#include <bit>
#include <cmath>
#include <ranges>
#include <set>

#include "core/check.h"
#include "core/sizes.h"

namespace cohort {

static constexpr double kStatesPerRow = KVCacheConfig::kStatesPerRow;

int64_t fitting_sequences(double blocks, double state_blocks, double sequence_blocks) {
  return std::max<int64_t>(
      1, static_cast<int64_t>(blocks / (kStatesPerRow * state_blocks + sequence_blocks / 2)));
}

int64_t Scheduler::submit(EngineRequest in) {
  const int64_t id = next_request_++;
  if (in.completions.empty()) return id;
  Request& request = requests_[id];
  request.id = id;
  request.limits = {.stop_tokens = static_cast<int64_t>(in.stop_tokens.size()),
                    .biases = static_cast<int64_t>(in.logit_bias.size()),
                    .penalties = std::ranges::any_of(in.completions, kernels::has_penalty)};
  request.in = std::move(in);
  request.unfinished = static_cast<int64_t>(request.in.completions.size());
  for (int64_t i = 0; i < request.unfinished; ++i) {
    request.completions.push_back(std::make_shared<Sequence>());
    request.completions.back()->request = &request;
    request.completions.back()->completion = i;
    request.completions.back()->max_length = request.in.max_length;
  }
  waiting_.insert(waiting_.end(), request.completions.begin(), request.completions.end());
  return id;
}

void Scheduler::cancel(int64_t request, int64_t completion) {
  const auto it = requests_.find(request);
  if (it == requests_.end()) return;
  const SequencePtr sequence = it->second.completions.at(static_cast<size_t>(completion));
  if (sequence->closed) return;
  stop(*sequence);
  leave(sequence);
  close(*sequence);
}

void Scheduler::end_turn(int64_t request, int64_t completion, int64_t length) {
  const SequencePtr s = requests_.at(request).completions.at(static_cast<size_t>(completion));
  const int64_t sampled = length - s->request->prompt_length();
  COHORT_CHECK(s->request->is_session() && !s->closed && sampled > 0 &&
                   sampled <= static_cast<int64_t>(s->output.size()),
               "[engine] a turn cannot end after ", length, " tokens");
  const int64_t computed = s->length() - 1;  // in the cache, at most
  s->output.resize(static_cast<size_t>(sampled));
  if (s->done) {  // later tokens have ended it
    keep(*s, std::min(s->kept_length, length - 1));
    return;
  }
  if (std::ranges::find(running_, s) != running_.end()) hold(*s, length - 1, computed);
  stop(*s);
  leave(s);
}

void Scheduler::extend(int64_t request, int64_t completion, std::span<const int32_t> tokens,
                       int64_t max_length) {
  SequencePtr& s = requests_.at(request).completions.at(static_cast<size_t>(completion));
  COHORT_CHECK(s->done && !s->closed && !tokens.empty(),
               "[engine] only a completion between two turns can be extended");
  // Steps in flight refer to the sequence of the turn before, which is done.
  const SequencePtr next = std::make_shared<Sequence>(std::move(*s));
  s->done = true;
  s = next;
  next->done = false;
  next->in_flight = next->prefilled = 0;
  next->max_length = max_length;
  for (std::vector<int32_t>* to : {&next->output, &next->observed})
    to->insert(to->end(), tokens.begin(), tokens.end());
  COHORT_CHECK(next->length() < max_length && max_length <= next->request->limit(),
               "[engine] expected a maximum length over ", next->length(), " and up to ",
               next->request->limit(), ", got ", max_length);
  waiting_.push_front(next);
}

void Scheduler::cancel_all() {
  while (!requests_.empty()) {
    const int64_t id = requests_.begin()->first;
    const size_t count = requests_.begin()->second.completions.size();
    for (size_t i = 0; i < count; ++i) cancel(id, static_cast<int64_t>(i));
  }
}

SchedulerStats Scheduler::stats() const {
  SchedulerStats out = stats_;
  out.running = static_cast<int64_t>(running_.size() + prefills_.size());
  out.waiting = static_cast<int64_t>(waiting_.size());
  if (table_ != nullptr) {
    out.blocks = table_->num_blocks();
    out.used_blocks = out.blocks - table_->free_blocks();
  }
  return out;
}

void Scheduler::update_peaks() {
  stats_.most_running = std::max(stats_.most_running, static_cast<int64_t>(running_.size()));
  stats_.most_blocks = std::max(stats_.most_blocks, table_->num_blocks() - table_->free_blocks());
}

// ---- Capacity

Scheduler::Capacity Scheduler::wanted_capacity(int64_t allowed_blocks) const {
  Capacity out;
  // Blocks of all waiting sequences together, and of the longest alone. The first completion of a
  // prompt counts the prompt's blocks; the partial last block of a prompt may be held in addition
  // to the copies that its completions own. Of sessions, which may have many times the length of
  // their first turn, `expected` counts that alone.
  int64_t all = 0, expected = 0, longest = 0;
  for (const SequencePtr& s : waiting_) {
    constexpr int64_t kBlock = KVCacheConfig::kBlockTokens;
    const int64_t shared = s->completion > 0 ? s->request->prompt_length() / kBlock : -1;
    all += ceil_div(s->request->limit(), kBlock) - shared;
    expected += ceil_div(s->max_length, kBlock) - shared;
    longest = std::max(longest, ceil_div(s->request->limit(), kBlock) + 1);
    out.limits = out.limits.with(s->request->limits);
  }
  const auto count = static_cast<int64_t>(waiting_.size());
  int64_t concurrent = std::min(config_.concurrent(count), memory_limits_.sequences);
  if (state_blocks_ > 0 && config_.max_cache_tokens == 0) {
    const double of_one =
        static_cast<double>(expected) / static_cast<double>(std::max<int64_t>(count, 1));
    concurrent = std::max<int64_t>(
        1, std::min(concurrent,
                    fitting_sequences(static_cast<double>(allowed_blocks), state_blocks_, of_one)));
    allowed_blocks -= static_cast<int64_t>(
        std::ceil(kStatesPerRow * state_blocks_ * static_cast<double>(concurrent)));
  }
  // Eight sizes per power of two, so that the next requests are likely to fit the same cache.
  const auto rounded = [](int64_t n) {
    return round_up(n, std::max<int64_t>(1, std::bit_floor(static_cast<uint64_t>(n)) / 8));
  };
  const int64_t useful = rounded(std::max(longest, std::min(all, concurrent * longest)));
  out.num_blocks = std::max(longest, std::min({useful, allowed_blocks, memory_limits_.blocks}));
  // Fewer sequences avoid preemptions: each is expected to reach half of its maximum length.
  out.num_sequences = concurrent;
  if (config_.max_concurrent == 0)
    out.num_sequences = std::clamp<int64_t>(
        2 * out.num_blocks * count / std::max<int64_t>(1, expected), 1, concurrent);
  return out;
}

void Scheduler::set_capacity(BlockTable* table, const SlotLimits& limits) {
  COHORT_CHECK(is_idle(), "[scheduler] the table of running sequences cannot be replaced");
  if (table != table_) evict_all();
  table_ = table;
  limits_ = limits;
  stopped_slots_.clear();
}

void Scheduler::preempt_all() {
  evict_all();
  for (Sequences* list : {&prefills_, &ready_, &running_}) list->clear();
  waiting_.clear();
  for (auto& [id, request] : requests_)
    for (const SequencePtr& s : request.completions) {
      if (s->done) continue;
      stats_.preemptions += s->slot >= 0 ? 1 : 0;
      stop(*s);
      s->in_flight = 0;
      waiting_.push_back(s);
    }
  postponed_steps_ = 0;
}

bool Scheduler::shrink(const Capacity& failed) {
  Limits& l = memory_limits_;
  if (failed.num_blocks > wanted_capacity(0).num_blocks) {
    l.blocks = failed.num_blocks / 2;
    if (kStatesPerRow * state_blocks_ * static_cast<double>(failed.num_sequences) >
        static_cast<double>(failed.num_blocks))
      l.sequences = std::max<int64_t>(1, failed.num_sequences / 2);
    return true;
  }
  // A prefill computes no more tokens than the cache holds.
  constexpr int64_t kBlock = KVCacheConfig::kBlockTokens;
  const int64_t tokens = std::min(l.prefill_tokens, kBlock * failed.num_blocks);
  if (failed.num_sequences <= 1 && tokens <= kBlock && std::exchange(l.is_last_try, true)) {
    l = {};
    return false;
  }
  l.sequences = std::max<int64_t>(1, failed.num_sequences / 2);
  l.prefill_tokens = std::max(kBlock, tokens / 2);
  return true;
}

// ---- Admission

std::vector<Scheduler::Chunk> Scheduler::schedule_prefill() {
  if (should_admit()) {
    choose_prefills(false);
    fork_completions();
    if (table_->lacks_state()) choose_prefills(true);
  }
  std::vector<Chunk> chunks;
  int64_t budget = memory_limits_.prefill_tokens;
  std::erase_if(prefills_, [&](const SequencePtr& s) {
    // The state of a prompt is held where its last token is that of a chunk.
    const int64_t begin = s->prefilled, prompt = s->request->prompt_length(),
                  end = table_->has_states() && begin < prompt ? prompt : s->prefill_length(),
                  count = std::min(budget, end - begin);
    s->prefilled += count;
    budget -= count;
    if (count > 0) chunks.push_back({s, begin, s->prefilled});
    if (s->prefilled < s->prefill_length()) return false;
    ready_.push_back(s);
    return true;
  });
  stats_.prefilled_tokens += memory_limits_.prefill_tokens - budget;
  return chunks;
}

bool Scheduler::should_admit() {
  if (waiting_.empty() || table_->free_rows() == 0) return false;
  if (running_.empty()) return true;
  int64_t tokens = 0;
  const auto rows = static_cast<size_t>(table_->free_rows());
  const Request* last = nullptr;
  for (size_t i = 0; i < std::min(rows, waiting_.size()) && tokens < kMinPrefillTokens; ++i) {
    const Sequence& s = *waiting_[i];
    const bool shares_prompt = s.request->is_computed() || s.request == last;
    tokens += !s.kept.empty() ? s.prefill_length() - s.kept_length
              : shares_prompt ? kForkTokens
                              : s.prefill_length();
    last = s.request;
  }
  if (tokens < kMinPrefillTokens && ++postponed_steps_ < kMaxPostponedSteps) return false;
  postponed_steps_ = 0;
  return true;
}

// Gives a sequence a row and blocks for its prefill: those kept from its last turn, or else those
// of its prompt, if it is computed. Returns false and changes nothing if there are not enough free
// blocks.
bool Scheduler::enter_cache(Sequence& s) {
  if (!s.kept.empty() &&
      table_->blocks_for(s.prefill_length()) - std::ssize(s.kept.blocks) > table_->free_blocks())
    return false;
  const int32_t row = table_->acquire();
  const Request& request = *s.request;
  const bool shares = s.kept.empty() && request.is_computed();
  if (!s.kept.empty()) table_->resume(row, std::exchange(s.kept, {}));
  if ((shares && !table_->start_with(row, request.held, request.prompt_length())) ||
      !table_->reserve(row, s.prefill_length())) {
    table_->release(row);
    return false;
  }
  s.slot = row;
  s.prefilled = shares ? request.prompt_length() : std::exchange(s.kept_length, 0);
  return true;
}

// Calls enter_cache() if `spare` blocks are free besides the sequence's own or no sequence is in
// the cache, and evicts what is kept between turns for that, and for a state spare prompts first.
bool Scheduler::evict_for(Sequence& s, int64_t spare) {
  const int64_t needed = table_->blocks_for(s.prefill_length()) - std::ssize(s.kept.blocks) + spare;
  do {
    if ((is_idle() || spare == 0 || table_->free_blocks() >= needed) && enter_cache(s)) return true;
  } while ((table_->lacks_state() && s.kept.empty() && evict_spare_prompt(*s.request)) ||
           evict_kept());
  return false;
}

// Starts prefills of waiting sequences whose prompts are not computed, in order, within the limits
// of rows, blocks, and tokens of one forward; with `only_kept` of later turns alone.
void Scheduler::choose_prefills(bool only_kept) {
  int64_t tokens = 0, rows = table_->free_rows();
  std::set<const Request*> started;
  for (const SequencePtr& s : prefills_) {
    tokens += s->prefill_length() - s->prefilled;
    started.insert(s->request);
  }
  bool full = false;
  std::erase_if(waiting_, [&](const SequencePtr& s) {
    const Request& request = *s->request;
    // A request over the capacity waits until no sequence is in the cache, which may then grow.
    const bool fits =
        table_->blocks_for(request.limit()) < table_->num_blocks() && limits_.cover(request.limits);
    const bool is_kept = !s->kept.empty(), is_passed = only_kept && !is_kept;
    full = full || !fits || tokens >= memory_limits_.prefill_tokens || (!is_passed && rows-- <= 0);
    // Further completions of a prompt wait until its prefill is done.
    if (full || is_passed || (!is_kept && (request.is_computed() || started.contains(&request))))
      return false;
    // One spare block per running sequence, so that growth does not preempt at once.
    full = !evict_for(*s, static_cast<int64_t>(running_.size()));
    if (full) return false;
    if (!is_kept) started.insert(&request);
    tokens += s->prefill_length() - s->prefilled;
    prefills_.push_back(s);
    return true;
  });
}

// Admits waiting completions of computed prompts: each shares the prompt's blocks.
void Scheduler::fork_completions() {
  bool full = false;
  std::erase_if(waiting_, [&](const SequencePtr& s) {
    full = full || table_->free_rows() == 0;
    if (full || !s->request->is_computed()) return false;
    full = !evict_for(*s, 0);
    if (!full) (s->prefilled < s->prefill_length() ? prefills_ : ready_).push_back(s);
    return !full;
  });
}

Scheduler::Sequences Scheduler::schedule_starts(const std::vector<Chunk>& computed) {
  for (const Chunk& chunk : computed)
    if (Request& request = *chunk.sequence->request; chunk.completes_prompt())
      request.held = table_->hold(chunk.sequence->slot, request.prompt_length());
  if (!computed.empty()) fork_completions();
  for (const Chunk& chunk : computed)
    if (Request& request = *chunk.sequence->request;
        chunk.completes_prompt() && request.is_computed() && !table_->own_state(request.held))
      evict_prompt(request);
  for (const SequencePtr& s : ready_) {
    if (s->output.empty()) ++s->in_flight;
    running_.push_back(s);
  }
  if (!ready_.empty()) update_peaks();
  return std::exchange(ready_, {});
}

// ---- Decoding

Scheduler::Decode Scheduler::schedule_decode(size_t unread_steps) {
  // Each sequence needs a cache entry for its last token, whose keys and values this step computes.
  for (size_t i = 0; i < running_.size();) {
    const Sequence& s = *running_[i];
    if (s.is_full() || table_->reserve(s.slot, s.length())) {
      ++i;
    } else {
      if (!free_blocks_for_growth(unread_steps)) return Decode::kReadTokens;
      i = 0;
    }
  }
  bool ready = false;
  for (const SequencePtr& s : running_) {
    if (s->is_full()) continue;
    ++stats_.decoded_at[s->length() - 1];
    ++s->in_flight;
    ready = true;
  }
  if (!ready) return Decode::kIdle;
  update_peaks();
  ++stats_.decode_steps;
  return Decode::kReady;
}

// Frees blocks of a full cache. Returns false if the tokens of unread steps, which may end
// sequences, come first.
bool Scheduler::free_blocks_for_growth(size_t unread_steps) {
  if (evict_kept()) return true;
  for (auto& [id, request] : requests_) {
    const bool used =
        std::ranges::any_of(request.completions, [](const SequencePtr& s) { return s->slot >= 0; });
    if (used || !request.is_computed()) continue;
    evict_prompt(request);
    return true;
  }
  if (unread_steps > 0) return false;
  for (const SequencePtr& s : waiting_) {
    if (s->kept.empty()) continue;
    keep(*s, 0);
    return true;
  }
  COHORT_CHECK(!prefills_.empty() || running_.size() > 1,
               "[engine] a single sequence has filled the cache of ", table_->num_blocks(),
               " blocks");
  Sequences& from = prefills_.empty() ? running_ : prefills_;
  const SequencePtr youngest = from.back();
  from.pop_back();
  stop(*youngest);
  waiting_.push_front(youngest);
  ++stats_.preemptions;
  return true;
}

// Removes a sequence from the cache that the device would otherwise continue.
void Scheduler::stop(Sequence& sequence) {
  if (sequence.slot < 0) return;
  stopped_slots_.push_back(sequence.slot);
  table_->release(std::exchange(sequence.slot, -1));
}

void Scheduler::evict_all() {
  for (auto& [id, request] : requests_) {
    evict_prompt(request);
    for (const SequencePtr& s : request.completions) keep(*s, 0);
  }
}

// Evicts the blocks of the youngest completion that waits between two turns. Returns false if none
// has any.
bool Scheduler::evict_kept() {
  for (auto request = requests_.rbegin(); request != requests_.rend(); ++request) {
    if (!request->second.is_session()) continue;
    for (const SequencePtr& s : request->second.completions) {
      if (!s->done || s->kept.empty()) continue;
      keep(*s, 0);
      return true;
    }
  }
  return false;
}

// Evicts the youngest prompt that no completion waits for. Returns false if there is none.
bool Scheduler::evict_spare_prompt(const Request& not_this) {
  for (auto& [id, request] : requests_ | std::views::reverse) {
    const bool waits = std::ranges::any_of(request.completions, [](const SequencePtr& s) {
      return s->output.empty() && s->slot < 0 && !s->done;
    });
    if (waits || !request.is_computed() || &request == &not_this) continue;
    evict_prompt(request);
    return true;
  }
  return false;
}

// Keeps the first `length` tokens of a sequence that leaves the cache, which has computed
// `computed` tokens, if its state allows it.
void Scheduler::hold(Sequence& s, int64_t length, int64_t computed) {
  if (!table_->state_serves(computed, length)) return;
  s.kept = table_->hold(s.slot, length);
  s.kept_length = length;
  s.state_length = computed;
}

// Keeps the first `length` of the tokens that are kept, if the state allows it, and frees the rest.
void Scheduler::keep(Sequence& s, int64_t length) {
  if (s.kept.empty()) return;
  s.kept_length = table_->state_serves(s.state_length, length) ? length : 0;
  table_->shorten(s.kept, s.kept_length);
}

void Scheduler::evict_prompt(Request& request) {
  if (request.is_computed()) table_->shorten(request.held, 0);
}

EngineToken::End Scheduler::append(const SequencePtr& s, int32_t token) {
  using End = EngineToken::End;
  --s->in_flight;
  s->output.push_back(token);
  ++stats_.decoded_tokens;
  memory_limits_.is_last_try = false;
  const std::vector<int32_t>& stops = s->request->in.stop_tokens;
  const bool stopped = std::ranges::find(stops, token) != stops.end();
  if (!stopped && (!s->is_full() || s->in_flight > 0)) return End::kNone;
  if (s->request->is_session()) {
    const int64_t computed = s->length() - 1 - s->in_flight;
    hold(*s, computed, computed);
    leave(s);
  } else {
    leave(s);
    close(*s);
  }
  return stopped ? End::kStopToken : End::kLength;
}

// Takes a sequence that is done out of all lists and out of the cache.
void Scheduler::leave(const SequencePtr& sequence) {
  sequence->done = true;
  std::erase(waiting_, sequence);
  for (Sequences* list : {&prefills_, &ready_, &running_}) std::erase(*list, sequence);
  if (sequence->slot >= 0) table_->release(std::exchange(sequence->slot, -1));
}

void Scheduler::close(Sequence& sequence) {
  sequence.closed = true;
  keep(sequence, 0);
  Request& request = *sequence.request;
  if (--request.unfinished > 0) return;
  evict_prompt(request);
  requests_.erase(request.id);
}

}  // namespace cohort
