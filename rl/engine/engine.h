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
// once, and its completions share the blocks of its keys and values, and start with copies of its
// state in delta layers. Sequences allocate blocks as they grow; when the cache is full, the
// youngest sequence is preempted and recomputed later. The sampled tokens depend on the request
// alone, to the bit: not on concurrent requests, nor on the size of the cache. The scheduler
// decides what a step computes; the engine enqueues it.
//
// A step that runs out of memory ends no request: its sequences are recomputed with a cache of half
// the size (Scheduler::shrink()). This limit stays for the life of the engine, as other users of
// the memory are likely to, or until the least capacity fails too.
//
// On CUDA the host enqueues a step before it has read the tokens of the previous step: the device
// itself feeds tokens to the next step and detects where a sequence ends.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/allocator.h"
#include "rl/engine/decode_slots.h"
#include "rl/engine/scheduler.h"

namespace cohort {

struct EngineStats : SchedulerStats {
  int64_t decode_bytes = 0;  // bytes of weights and cache read by decode steps
};

class Engine {
 public:
  // Keeps a reference to the model. Its weights must not change while requests are unfinished.
  Engine(const Transformer& model, const EngineConfig& config);

  // Throws Error for an invalid request or one that is longer than the model's context.
  int64_t submit(EngineRequest request);
  // Ends a completion: poll() returns no further token of it.
  void cancel(int64_t request, int64_t completion) { scheduler_.cancel(request, completion); }
  void cancel_all();
  // Sessions (EngineRequest::session_length), whose completions end by cancel() alone. A turn ends
  // by a stop token or at its maximum length, or here: after the completion's first `length`
  // tokens, the last of which poll() has returned in this turn. extend() continues a completion
  // whose turn has ended: `tokens`, at least one, follow what it has, and the next turn is sampled
  // up to `max_length` tokens in all. Both throw Error for a completion in another state.
  void end_turn(int64_t request, int64_t completion, int64_t length) {
    scheduler_.end_turn(request, completion, length);
  }
  void extend(int64_t request, int64_t completion, std::span<const int32_t> tokens,
              int64_t max_length);
  // Runs one scheduling step. Returns false if there is nothing left to do: no request, or only
  // completions between two turns; all tokens are then in poll().
  // Throws NonFiniteError if logits are not finite, OutOfMemoryError if there is no memory for the
  // longest sequence alone. Any exception cancels all requests.
  bool step();
  // The tokens sampled since the last call, those of a completion in order.
  std::vector<EngineToken> poll() { return std::exchange(tokens_, {}); }

  // Frees the cache, the slots and their recorded steps, and returns the device's cached blocks to
  // the system. The next request makes them anew. Throws Error while requests are unfinished.
  void release_cache();

  EngineStats stats() const;
  void reset_stats() { scheduler_.reset_stats(); }
  // Size of the current cache, in bytes and as human-readable text.
  int64_t cache_bytes() const;
  std::string cache_summary() const;
  const Transformer& model() const { return model_; }

 private:
  using Sequences = Scheduler::Sequences;
  // Final hidden state of a prompt's last token: a row of a tensor [n, C].
  struct PromptHidden {
    Tensor hidden;
    int32_t row = 0;
    int64_t forward = 0;  // number of the forward that has computed the tensor
  };

  void run_step();
  void shrink(const OutOfMemoryError& error);
  void drop_cache();
  // Grows the cache and the slots to the capacity that the waiting requests need.
  void ensure_capacity();
  int64_t allowed_blocks() const;
  bool admit();
  void set_adapters(const Sequences& sequences);
  void prefill(const std::vector<Scheduler::Chunk>& chunks);
  void sample_first_tokens(const Sequences& sequences);
  bool decode();
  // Reads the tokens of the oldest steps, until at most `max_pending` are in flight.
  void collect(size_t max_pending);

  const Transformer& model_;
  const EngineConfig config_;
  const size_t max_pending_;    // sampling steps that may be in flight while the next is enqueued
  const int64_t weight_bytes_;  // read per decode step
  const int64_t block_bytes_;   // 1 if no layer has keys and values
  const int64_t state_bytes_;   // a sequence's; 0: the model has no states
  Scheduler scheduler_;
  std::unique_ptr<KVCache> cache_;
  std::unique_ptr<DecodeSlots> slots_;
  std::vector<const void*> weights_;  // their addresses when slots_ was made
  Scheduler::Capacity capacity_;      // that the cache has, or that could not be allocated
  bool has_reported_shrinking_ = false, has_reported_kept_memory_ = false;

  bool has_new_requests_ = false;            // since ensure_capacity()
  std::map<int64_t, PromptHidden> prompts_;  // by request; computed, or until the next prefill
  int64_t next_forward_ = 0;
  std::deque<SampledTokens> pending_;  // enqueued and not yet read by the host
  std::vector<EngineToken> tokens_;
};

}  // namespace cohort
