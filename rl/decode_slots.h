// The device's side of the rollout engine: what it knows of each sequence that is decoded (a slot),
// and the decode steps that run on that alone. Slots are rows of the cache's block table.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/readback.h"
#include "core/replay.h"
#include "kernels/sampling.h"
#include "nn/transformer.h"

namespace cohort {

// What is added to the logits of some tokens before they are drawn.
using LogitBias = std::vector<std::pair<int32_t, float>>;

// Tokens that were drawn, on their way to the host.
struct DrawnTokens {
  Readback tokens;      // [n]
  Readback statistics;  // [3, n]: log-probs, entropies, what was cut
};

// What slots have room for.
struct SlotLimits {
  int64_t stop_tokens = 1, biases = 0;
  bool penalties = false;
  // Whether these are enough for `other`.
  bool cover(const SlotLimits& other) const;
  // The larger of each.
  SlotLimits with(const SlotLimits& other) const;
};

// A sequence that is decoded from now on. The cache holds all of its tokens but the last.
struct SlotStart {
  int32_t slot = 0;
  std::span<const int32_t> prompt, drawn;
  int64_t max_length = 0;  // tokens at which the sequence is full
  kernels::DrawParams draw;
  std::span<const int32_t> stop_tokens;
  const LogitBias* logit_bias = nullptr;
};

class DecodeSlots {
 public:
  // A slot for each row of `cache`.
  DecodeSlots(const Transformer& model, KVCache& cache, const SlotLimits& limits);
  ~DecodeSlots();

  const SlotLimits& limits() const { return limits_; }
  void start(std::span<const SlotStart> starts);
  // These slots draw nothing from now on.
  void stop(const std::vector<int32_t>& slots);
  // A token for each slot, drawn from its row of `hidden` [n, C]; the slots go on after it.
  DrawnTokens draw(const Tensor& hidden, const std::vector<int32_t>& slots);

  // Which slots decode() serves, in the order of its rows.
  void choose(const std::vector<int32_t>& slots);
  // The rows of a step for so many slots. A CUDA graph has a fixed number of rows, so there are a
  // few sizes, with idle rows to fill them.
  int64_t rows_for(size_t slots) const;
  // A token for each chosen slot; those that have ended get none.
  DrawnTokens decode();

 private:
  struct Drawn;
  class Step;
  void draw_rows(Drawn& out, const Tensor& hidden, const Tensor& active, const Tensor& rng_index);
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
  // Of all recorded steps: one runs at a time.
  std::shared_ptr<ReplayMemory> memory_ = std::make_shared<ReplayMemory>();
  std::map<int64_t, std::unique_ptr<Step>> steps_;  // by number of rows
  Step* chosen_ = nullptr;
};

}  // namespace cohort
