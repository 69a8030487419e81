// The rollout engine: continuous batching (Yu et al. 2022) of sampling requests over a paged KV
// cache. It computes on the trained weights themselves and lives as long as the model: its cache
// and its recorded decode steps serve one request after the other. Between requests the cache's
// memory is released to other allocations, such as an update's activations.
//
//   const int64_t id =
//       engine.submit({.prompt = tokens, .max_length = 512, .completions = {params}});
//   while (engine.step())
//     for (const EngineToken& t : engine.poll()) ...
//
// A request is a prompt and the sampling parameters of its completions. The prompt is prefilled
// once, and its completions share the blocks of its keys and values. Sequences allocate blocks as
// they grow; when the cache is full, the youngest sequence is preempted and recomputed later. The
// sampled tokens depend on the request alone, to the bit: not on concurrent requests, nor on the
// size of the cache.
//
// On CUDA the host enqueues a step before it has read the tokens of the previous step: the device
// itself feeds tokens to the next step and detects where a sequence ends.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "config/visitor.h"
#include "rl/engine/decode_slots.h"

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
            "upper limit of the cache of keys and values, relative to the free memory",
            {.min = 0.001, .max = 0.95});
    v.field("max_cache_tokens", max_cache_tokens,
            "upper limit of the cache in tokens; 0: as many as memory_fraction allows", {.min = 0});
  }
};

struct EngineRequest {
  std::vector<int32_t> prompt;  // at least one token
  int64_t max_length = 0;       // prompt and completion together; longer than the prompt
  std::vector<kernels::SamplingParams> completions;
  std::vector<int32_t> stop_tokens;  // each ends a completion
  LogitBias logit_bias;
};

// A sampled token with its statistics (kernels::Samples).
struct EngineToken {
  int64_t request = 0, completion = 0;
  int32_t token = 0;
  double logprob = 0, entropy = 0, truncated_mass = 0;
  enum class End { kNone, kStopToken, kLength } end = End::kNone;
};

struct EngineStats {
  // Totals since the engine's construction or reset_stats().
  int64_t decode_steps = 0, decoded_tokens = 0, prefilled_tokens = 0, preemptions = 0;
  int64_t decode_bytes = 0;  // bytes of weights and cache read by decode steps
  int64_t most_running = 0, most_blocks = 0;
  // Current values: sequences, and blocks of the cache.
  int64_t running = 0, waiting = 0, used_blocks = 0, blocks = 0;
};

class Engine {
 public:
  // Keeps a reference to the model. Its weights must not change while requests are unfinished.
  Engine(const Transformer& model, const EngineConfig& config);
  ~Engine();

  // Throws Error for an invalid request or one that is longer than the model's context.
  int64_t submit(EngineRequest request);
  // Ends a completion: poll() returns no further token of it.
  void cancel(int64_t request, int64_t completion);
  void cancel_all();
  // Runs one scheduling step. Returns false if no request is left; all tokens are then in poll().
  // Throws NonFiniteError if logits are not finite. Any exception cancels all requests.
  bool step();
  // The tokens sampled since the last call, those of a completion in order.
  std::vector<EngineToken> poll() { return std::exchange(tokens_, {}); }

  EngineStats stats() const;
  void reset_stats() { stats_ = {}; }
  // Size of the current cache, in bytes and as human-readable text.
  int64_t cache_bytes() const;
  std::string cache_summary() const;
  const Transformer& model() const { return model_; }

 private:
  struct Request;
  struct Sequence;
  struct Prefill;
  struct PendingSamples;
  using SequencePtr = std::shared_ptr<Sequence>;
  using Sequences = std::vector<SequencePtr>;

  void schedule();
  void update_peaks();
  // Grows the cache and the slots to the capacity that the waiting requests need.
  void ensure_capacity();
  bool has_capacity_for(const Request& request) const;
  SlotLimits limits_of_waiting() const;
  KVCacheConfig cache_for_waiting() const;
  // Admission.
  bool admit();
  bool should_admit();
  void choose_prefills();
  void run_prefills(Sequences& ready);
  void fork_completions(Sequences& ready);
  void start(const Sequences& ready);
  void sample_first_tokens(const Sequences& ready);
  // Decoding.
  bool decode();
  void reclaim_blocks();
  void preempt(const SequencePtr& sequence);
  void stop(Sequence& sequence);
  void release_row(Sequence& sequence);
  void evict_prompt(Request& request);
  // Results.
  void collect();
  void append_token(const SequencePtr& sequence, EngineToken token);
  void end(const SequencePtr& sequence);

  const Transformer& model_;
  const EngineConfig config_;
  const size_t max_pending_;  // sampling steps that may be in flight while the next is enqueued
  const int64_t weight_bytes_, token_bytes_;  // read per decode step, and per token in the cache
  std::unique_ptr<KVCache> cache_;
  std::unique_ptr<DecodeSlots> slots_;

  std::map<int64_t, std::shared_ptr<Request>> requests_;  // with unfinished completions
  std::deque<SequencePtr> waiting_;
  std::vector<Prefill> prefills_;  // partly in the cache
  Sequences running_;              // in the cache, the oldest first
  Sequences decode_rows_;
  bool rows_changed_ = true;
  std::vector<int32_t> stopped_slots_;  // not yet stopped on the device
  std::deque<PendingSamples> pending_;  // enqueued and not yet read by the host
  std::vector<EngineToken> tokens_;
  int64_t next_request_ = 0;
  bool has_new_requests_ = false;  // since ensure_capacity()
  int64_t postponed_steps_ = 0;    // steps for which should_admit() has delayed an admission
  EngineStats stats_;
};

}  // namespace cohort
