// Device state of the rollout engine: one slot per sequence that is decoded, and the decode steps,
// which read and update that state without the host. Slots are rows of the cache's block table.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/graph.h"
#include "core/readback.h"
#include "kernels/sampling.h"
#include "nn/transformer.h"

namespace cohort {

// Pairs of a token and the bias that is added to its logit before sampling.
using LogitBias = std::vector<std::pair<int32_t, float>>;

// Sampled tokens whose copies to the host are in flight.
struct SampledTokens {
  Readback tokens;      // [n]
  Readback statistics;  // [3, n]: log-probs, entropies, truncated masses
};

// Capacity of a slot.
struct SlotLimits {
  int64_t stop_tokens = 1, biases = 0;
  bool penalties = false;
  // Returns true if no limit is below that of `other`.
  bool cover(const SlotLimits& other) const;
  // The maximum of each limit.
  SlotLimits with(const SlotLimits& other) const;
};

// Initial state of a slot. The cache holds all tokens of the sequence but the last.
struct SlotStart {
  int32_t slot = 0;
  std::span<const int32_t> prompt, sampled;
  int64_t max_length = 0;  // prompt and completion together
  kernels::SamplingParams params;
  std::span<const int32_t> stop_tokens;
  const LogitBias* logit_bias = nullptr;
};

class DecodeSlots {
 public:
  // Creates a slot for each row of `cache`.
  DecodeSlots(const Transformer& model, KVCache& cache, const SlotLimits& limits);
  ~DecodeSlots();

  const SlotLimits& limits() const { return limits_; }
  void start(std::span<const SlotStart> starts);
  // Makes these slots idle: they sample nothing until they are started again.
  void stop(const std::vector<int32_t>& slots);
  // Samples a token for each slot from its row of `hidden` [n, C] and advances the slots.
  SampledTokens sample(const Tensor& hidden, const std::vector<int32_t>& slots);

  // Sets the slots that decode() serves, in the order of its rows.
  void choose(const std::vector<int32_t>& slots);
  // Number of rows in a step that serves `slots` slots. A CUDA graph has a fixed number of rows, so
  // there are a few sizes, padded with idle rows.
  int64_t rows_for(size_t slots) const;
  // Samples a token for each chosen slot that is not idle.
  SampledTokens decode();

 private:
  struct DeviceSamples;
  class Step;
  void sample_rows(DeviceSamples& out, const Tensor& hidden, const Tensor& active,
                   const Tensor& rng_index);
  void start_biases(std::span<const SlotStart> starts, const Tensor& at);
  void start_counts(const SlotStart& start);
  Tensor upload(const std::vector<int32_t>& values) const;

  const Transformer& model_;
  KVCache& cache_;
  const Device device_;
  const SlotLimits limits_;
  Tensor slots_;        // [S, kSlotColumns]
  Tensor stop_tokens_;  // [S, limits.stop_tokens], -1 where there are fewer
  kernels::SamplingState sampling_;
  // Shared by all recorded steps, of which one runs at a time.
  std::shared_ptr<GraphMemory> memory_ = std::make_shared<GraphMemory>();
  std::map<int64_t, std::unique_ptr<Step>> steps_;  // by number of rows
  Step* chosen_ = nullptr;
};

}  // namespace cohort
