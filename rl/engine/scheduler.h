// Continuous batching (Yu et al. 2022) as decisions of the host alone: which sequences are
// admitted, prefilled, forked from a computed prompt, decoded, preempted and evicted. The scheduler
// knows neither model nor device: blocks are the numbers of a BlockTable. As in vLLM, it plans what
// runs and gets the sampled tokens back; as in SGLang, plans refer to its own sequences. A step:
//
//   chunks = schedule_prefill();         // upload the table, compute these tokens
//   starts = schedule_starts(chunks);    // upload the table, start these sequences
//   decode = schedule_decode(unread);    // if kReady: upload the table, decode running()
//   end = append(sequence, token);       // for each sampled token, in the order of sampling
//
// The completions of a session have turns: one that ends keeps its blocks, and extend() continues
// it after observed tokens. Blocks kept between turns are the first to be evicted.
//
// In a model with delta layers a sequence in the cache has a state, which is copied where blocks
// are shared. A computed prompt has a spare one, if there is any; otherwise it counts as not
// computed once its completions have forked. For a state, prompts without waiting completions are
// evicted first, then what is kept between turns. Where a sequence waits for a state, later turns
// that have kept theirs pass it: it gets one when any of their completions waits between turns, or
// ends.
//
// After a step that has run out of memory: preempt_all() and shrink(), then another table.
//
// The uploads are in this order because a fork copies a block that the chunks fill.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "config/visitor.h"
#include "core/non_copyable.h"
#include "kernels/sampling_params.h"
#include "nn/block_table.h"

namespace cohort {

// Maximum number of prompt tokens in one forward pass, which bounds its activations.
inline constexpr int64_t kPrefillTokens = 8192;

struct EngineConfig {
  int64_t max_concurrent = 0;    // concurrent sequences; 0: as many as the cache holds
  double memory_fraction = 0.5;  // upper limit of the cache, relative to the free memory
  int64_t max_cache_tokens = 0;  // upper limit in tokens; 0: as many as memory_fraction allows

  // Maximum number of concurrent sequences out of `sequences`.
  int64_t concurrent(int64_t sequences) const {
    constexpr int64_t kMaxConcurrent = 1024;
    return std::min(max_concurrent > 0 ? max_concurrent : kMaxConcurrent, sequences);
  }
  void visit(ConfigVisitor& v) {
    v.field("memory_fraction", memory_fraction,
            "upper limit of the cache, keys and values and states of delta layers, relative to the "
            "free memory",
            {.min = 0.001, .max = 0.95});
    v.field("max_cache_tokens", max_cache_tokens,
            "upper limit of the cache in tokens, of keys and values alone; 0: as many as "
            "memory_fraction allows",
            {.min = 0});
  }
};

// The number of sequences, at least 1, whose states take as much memory as `state_blocks` blocks
// each, with the spare ones, and fit in the memory of `blocks` blocks, with half of
// `sequence_blocks` blocks for each sequence: it is expected to reach half of its maximum length.
int64_t fitting_sequences(double blocks, double state_blocks, double sequence_blocks);

// Pairs of a token and the bias that is added to its logit before sampling.
using LogitBias = std::vector<std::pair<int32_t, float>>;

struct EngineRequest {
  std::vector<int32_t> prompt;  // at least one token
  int64_t max_length = 0;       // prompt and completion together; longer than the prompt
  // Above 0: a session. Its completions, which may have this length, stay until cancel(), and
  // extend() continues one that has ended; max_length is the limit of their first turn.
  int64_t session_length = 0;
  std::vector<kernels::SamplingParams> completions;
  std::vector<int32_t> stop_tokens;  // each ends a completion
  LogitBias logit_bias;
  int32_t adapter = 0;  // below LoraConfig::slots
};

// A sampled token with its statistics (kernels::Samples).
struct EngineToken {
  int64_t request = 0, completion = 0;
  int32_t token = 0;
  double logprob = 0, entropy = 0, truncated_mass = 0, sampling_logprob = 0;
  enum class End { kNone, kStopToken, kLength } end = End::kNone;
};

// Capacity of a slot.
struct SlotLimits {
  int64_t stop_tokens = 1, biases = 0;
  bool penalties = false;
  // Returns true if no limit is below that of `other`.
  bool cover(const SlotLimits& other) const {
    return stop_tokens >= other.stop_tokens && biases >= other.biases &&
           (penalties || !other.penalties);
  }
  // The maximum of each limit.
  SlotLimits with(const SlotLimits& other) const {
    return {.stop_tokens = std::max(stop_tokens, other.stop_tokens),
            .biases = std::max(biases, other.biases),
            .penalties = penalties || other.penalties};
  }
};

struct SchedulerStats {
  // Totals since construction or reset_stats().
  int64_t decode_steps = 0, decoded_tokens = 0, prefilled_tokens = 0, preemptions = 0;
  std::map<int64_t, int64_t> decoded_at;  // number of tokens that decode steps compute, by position
  int64_t most_running = 0, most_blocks = 0;
  // Current values: sequences, and blocks of the cache.
  int64_t running = 0, waiting = 0, used_blocks = 0, blocks = 0;
};

class Scheduler : NonCopyable {
 public:
  // A forward of few tokens costs about as much as one of kMinPrefillTokens: smaller prefills are
  // batched with later ones, delayed by at most kMaxPostponedSteps steps.
  static constexpr int64_t kMinPrefillTokens = 1024, kMaxPostponedSteps = 16;

  struct Sequence;
  using SequencePtr = std::shared_ptr<Sequence>;
  using Sequences = std::vector<SequencePtr>;

  // A request with unfinished completions.
  struct Request {
    int64_t id = 0;
    EngineRequest in;
    SlotLimits limits;  // needed by its completions
    Sequences completions;
    int64_t unfinished = 0;
    // The prompt, held from its prefill until the last completion has ended, or until eviction.
    BlockTable::Held held;
    bool is_computed() const { return !held.empty(); }
    int64_t prompt_length() const { return static_cast<int64_t>(in.prompt.size()); }
    bool is_session() const { return in.session_length > 0; }
    // Maximum length of its completions.
    int64_t limit() const { return std::max(in.max_length, in.session_length); }
  };

  // A completion of a request, or one turn of it. Only the scheduler writes it.
  struct Sequence {
    Request* request = nullptr;  // valid until done
    int64_t completion = 0;
    int64_t max_length = 0;         // at which the turn ends
    std::vector<int32_t> output;    // tokens after the prompt, of append() and of extend()
    std::vector<int32_t> observed;  // tokens of extend()
    int64_t in_flight = 0;          // tokens scheduled and not yet appended
    int64_t prefilled = 0;          // tokens shared with the prompt, kept, or computed by prefills
    int32_t slot = -1;              // row of the block table; -1: not in the cache
    bool done = false;              // the turn has ended
    bool closed = false;            // the completion has ended
    // The first `kept_length` tokens, held from the end of a turn until the next one enters the
    // cache, or until eviction; the state has `state_length` tokens.
    BlockTable::Held kept;
    int64_t kept_length = 0, state_length = 0;

    int64_t length() const {
      return request->prompt_length() + static_cast<int64_t>(output.size()) + in_flight;
    }
    bool is_full() const { return length() >= max_length; }
    // Token at a position of prompt and output.
    int32_t token(int64_t position) const {
      const int64_t prompt = request->prompt_length();
      return position < prompt ? request->in.prompt[static_cast<size_t>(position)]
                               : output[static_cast<size_t>(position - prompt)];
    }
    // Tokens that must be in the cache before the next one can be sampled, from the prompt's hidden
    // state or from a decode step of the last token.
    int64_t prefill_length() const { return output.empty() ? length() : length() - 1; }
  };

  // Tokens [begin, end) of a sequence, which one forward computes.
  struct Chunk {
    SequencePtr sequence;
    int64_t begin = 0, end = 0;
    // Returns true if the prompt's last token is in the chunk.
    bool completes_prompt() const {
      const int64_t prompt = sequence->request->prompt_length();
      return begin < prompt && prompt <= end;
    }
  };

  // Size of a cache, and of its slots.
  struct Capacity {
    int64_t num_sequences = 0, num_blocks = 0;
    SlotLimits limits;
  };

  enum class Decode {
    kReady,       // running() is decoded
    kIdle,        // no sequence can be decoded
    kReadTokens,  // the cache is full: append all unread tokens, then call again
  };

  // `state_blocks`: how many blocks take as much memory as the states of a sequence; 0: it has
  // none.
  explicit Scheduler(const EngineConfig& config, double state_blocks = 0)
      : config_(config), state_blocks_(state_blocks) {}

  // Adds a valid request and returns its number, which counts from 0.
  int64_t submit(EngineRequest request);
  // Ends a completion; no effect if it has ended.
  void cancel(int64_t request, int64_t completion);
  void cancel_all();
  // Ends the turn of a session's completion after its first `length` tokens, the last of which
  // append() has got in this turn. Later ones are dropped.
  void end_turn(int64_t request, int64_t completion, int64_t length);
  // Continues a session's completion, whose turn has ended, after these tokens, up to `max_length`.
  void extend(int64_t request, int64_t completion, std::span<const int32_t> tokens,
              int64_t max_length);
  // Requests with unfinished completions, by number.
  const std::map<int64_t, Request>& requests() const { return requests_; }

  // Returns false if every completion has ended, or waits between its turns.
  bool has_work() const { return !waiting_.empty() || !is_idle() || !ready_.empty(); }
  // Returns true if no sequence is in the cache, which may then be replaced.
  bool is_idle() const { return prefills_.empty() && running_.empty(); }
  // The capacity that all waiting sequences can use, of at most `allowed_blocks` blocks, or as many
  // as the longest sequence needs, within the limits of shrink(). The memory of states is taken
  // from that of the blocks, unless max_cache_tokens limits these.
  Capacity wanted_capacity(int64_t allowed_blocks) const;
  // Sets the block table, to which it keeps a pointer (null: none), and the limits of its slots,
  // which are all idle. Evicts the prompts of a former table. Throws Error unless is_idle().
  void set_capacity(BlockTable* table, const SlotLimits& limits);
  // For a step that has run out of memory, wherever it was. Returns all sequences to the waiting
  // ones, with the tokens that append() has got: the others are sampled again. Evicts all prompts.
  void preempt_all();
  // Halves the capacity `failed` that the waiting sequences have found too large, from now on:
  // first the blocks, with the number of sequences if their states are the larger part, then, if
  // the longest sequence needs them all, the number of sequences and the tokens of a prefill. If
  // nothing can be less, the same capacity may be tried once more after each appended token.
  // Otherwise returns false and lifts all these limits.
  [[nodiscard]] bool shrink(const Capacity& failed);

  // Admits sequences and returns the tokens to compute now, at most kPrefillTokens, or fewer after
  // shrink().
  std::vector<Chunk> schedule_prefill();
  // Returns the sequences that can be decoded from now on, once the chunks of schedule_prefill()
  // are enqueued. The first token of one without sampled tokens is to be sampled from its prompt's
  // hidden state.
  Sequences schedule_starts(const std::vector<Chunk>& computed);
  // Schedules one token for each sequence of running() that is not full. When the cache is full, it
  // frees blocks kept between turns, then a prompt without running completions, then the sequences
  // that unread tokens end, then the youngest sequence. `unread_steps`: number of sampling steps
  // whose tokens are not appended yet.
  Decode schedule_decode(size_t unread_steps);
  // Sequences in the cache, the oldest first.
  const Sequences& running() const { return running_; }
  // Frees the blocks of all computed prompts, and those kept between turns; for a step that can do
  // nothing else.
  void evict_all();
  // Returns the slots that the device must stop before the next start or decode step.
  std::vector<int32_t> take_stopped_slots() { return std::exchange(stopped_slots_, {}); }
  // Appends the next token of a sequence that is not done, and returns whether that ends it. The
  // device applies the same rule (kernels/decode.h).
  EngineToken::End append(const SequencePtr& sequence, int32_t token);

  SchedulerStats stats() const;
  void reset_stats() { stats_ = {}; }

 private:
  // The first token of a further completion of a prompt counts as this many prefill tokens.
  static constexpr int64_t kForkTokens = 64;
  // Upper limits, which shrink() lowers.
  struct Limits {
    int64_t blocks = int64_t{1} << 40, sequences = blocks, prefill_tokens = kPrefillTokens;
    bool is_last_try = false;  // the least capacity has failed since the last append()
  };

  void update_peaks();
  bool should_admit();
  bool enter_cache(Sequence& sequence);
  bool evict_for(Sequence& sequence, int64_t spare);
  bool evict_kept();
  bool evict_spare_prompt(const Request& not_this);
  void choose_prefills(bool only_kept);
  void fork_completions();
  bool free_blocks_for_growth(size_t unread_steps);
  void stop(Sequence& sequence);
  void evict_prompt(Request& request);
  void hold(Sequence& sequence, int64_t length, int64_t computed);
  void keep(Sequence& sequence, int64_t length);
  void leave(const SequencePtr& sequence);
  void close(Sequence& sequence);

  const EngineConfig config_;
  const double state_blocks_;
  Limits memory_limits_;
  BlockTable* table_ = nullptr;
  SlotLimits limits_;
  std::map<int64_t, Request> requests_;
  std::deque<SequencePtr> waiting_;
  Sequences prefills_;  // partly in the cache
  Sequences ready_;     // admitted since the last schedule_starts()
  Sequences running_;
  std::vector<int32_t> stopped_slots_;
  int64_t next_request_ = 0;
  int64_t postponed_steps_ = 0;  // steps for which should_admit() has delayed an admission
  SchedulerStats stats_;
};

}  // namespace cohort
