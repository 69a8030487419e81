// The rollout engine: requests go in, tokens come out, by continuous batching (Yu et al. 2022) over
// a paged cache. It computes on the trained weights themselves and lives as long as the model: its
// cache and its recorded decode steps serve one request after the other. Between them the cache's
// memory is lent to others, such as an update's activations.
//
//   const int64_t id = engine.submit({.prompt = tokens, .max_length = 512, .completions = {draw}});
//   while (engine.step())
//     for (const EngineToken& t : engine.poll()) ...
//
// A request is a prompt and the completions that are wanted of it. The prompt is computed once, and
// its completions share the blocks of its keys and values. Sequences take blocks as they grow; when
// none are left, the youngest gives its own up, waits, and is computed again. What is drawn depends
// on the request alone, to the bit: not on what runs beside it, nor on the size of the cache.
//
// On CUDA the host enqueues a step before it has seen the tokens of the one before: the device
// itself passes tokens on and sees where a sequence ends.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/config.h"
#include "rl/decode_slots.h"

namespace cohort {

// Tokens of prompts that one forward computes at most, so that its activations stay small.
inline constexpr int64_t kPrefillTokens = 8192;

struct EngineConfig {
  int64_t max_concurrent = 0;    // sequences that run together; 0: as many as there is room for
  double memory_fraction = 0.5;  // of the free memory: what the cache may take at most
  int64_t max_cache_tokens = 0;  // what it may hold at most; 0: as much as memory_fraction allows

  // How many of so many sequences run together at most.
  int64_t concurrent(int64_t sequences) const {
    constexpr int64_t kMost = 1024;
    return std::min(max_concurrent > 0 ? max_concurrent : kMost, sequences);
  }
  void visit(ConfigVisitor& v) {
    v.field("memory_fraction", memory_fraction,
            "of the free memory: what the cache of keys and values may take at most",
            {.min = 0.001, .max = 0.95});
    v.field("max_cache_tokens", max_cache_tokens,
            "tokens that it may hold at most; 0: as many as memory_fraction allows", {.min = 0});
  }
};

struct EngineRequest {
  std::vector<int32_t> prompt;  // at least one token
  int64_t max_length = 0;       // of prompt and completion together; above the prompt's
  std::vector<kernels::DrawParams> completions;  // how the tokens of each are drawn
  std::vector<int32_t> stop_tokens;              // each ends a completion
  LogitBias logit_bias;
};

// A token that was drawn.
struct EngineToken {
  int64_t request = 0, completion = 0;
  int32_t token = 0;
  double logprob = 0, entropy = 0, cut = 0;  // of the draw: kernels::Draws
  enum class End { kNone, kStopToken, kLength } end = End::kNone;
};

struct EngineStats {
  // Since the engine was made, or reset_stats().
  int64_t decode_steps = 0, decoded_tokens = 0, prefilled_tokens = 0, preemptions = 0;
  int64_t decode_bytes = 0;  // of weights and cache that decode steps had to read
  int64_t most_running = 0, most_blocks = 0;
  // Now: sequences, and blocks of the cache.
  int64_t running = 0, waiting = 0, used_blocks = 0, blocks = 0;
};

class Engine {
 public:
  // Refers to the model, whose weights may change while no request is under way.
  Engine(const Transformer& model, const EngineConfig& config);
  ~Engine();

  // Throws Error for a request that breaks its contract or is longer than the model's context.
  int64_t submit(EngineRequest request);
  // Ends a completion: no token of it comes any more.
  void cancel(int64_t request, int64_t completion);
  void cancel_all();
  // Does some work. False if none is left; all tokens are then in poll(). Throws NonFiniteError
  // where logits are not finite; whatever it throws, all requests are cancelled.
  bool step();
  // The tokens that have come since the last call, those of a completion in order.
  std::vector<EngineToken> poll() { return std::exchange(tokens_, {}); }

  EngineStats stats() const;
  void reset_stats() { stats_ = {}; }
  // The cache as it is now, in bytes and in words.
  int64_t cache_bytes() const;
  std::string room() const;
  const Transformer& model() const { return model_; }

 private:
  struct Request;
  struct Sequence;
  struct Prefill;
  struct Flight;
  using SequencePtr = std::shared_ptr<Sequence>;
  using Sequences = std::vector<SequencePtr>;

  void work();
  void note_use();
  // Room for what waits: the cache and the slots.
  void make_room();
  bool has_room_for(const Request& request) const;
  SlotLimits limits_of_waiting() const;
  KVCacheConfig cache_for_waiting() const;
  // Admission.
  bool admit();
  bool is_worth_admitting();
  void choose_prefills();
  Sequences run_prefills();
  void fork_completions(Sequences& ready);
  void start(const Sequences& ready);
  void draw_first_tokens(const Sequences& ready);
  // Decoding.
  bool decode();
  void free_blocks();
  void put_back(const SequencePtr& sequence);
  void stop(Sequence& sequence);
  void leave_cache(Sequence& sequence);
  void drop_prompt(Request& request);
  // What has come.
  void collect();
  void take_token(const SequencePtr& sequence, EngineToken token);
  void end(const SequencePtr& sequence);

  const Transformer& model_;
  const EngineConfig config_;
  const size_t depth_;  // draws that may be under way while others are enqueued
  const int64_t weight_bytes_, token_bytes_;  // read by a step, and for each token in the cache
  std::unique_ptr<KVCache> cache_;
  std::unique_ptr<DecodeSlots> slots_;

  std::map<int64_t, std::shared_ptr<Request>> requests_;  // that have completions to come
  std::deque<SequencePtr> waiting_;
  std::vector<Prefill> prefills_;  // in the cache, but not all of it
  Sequences running_;              // in the cache, the oldest first
  Sequences rows_;                 // of the decode step
  bool rows_changed_ = true;
  std::vector<int32_t> stopped_;  // slots that the device does not know to be idle
  std::deque<Flight> flights_;    // draws that are enqueued and not looked at
  std::vector<EngineToken> tokens_;
  int64_t next_request_ = 0;
  bool has_new_ = false;   // requests since make_room()
  int64_t postponed_ = 0;  // steps since there was somebody to admit
  EngineStats stats_;
};

}  // namespace cohort
