// Device state of the rollout engine: one slot per sequence that is decoded, and the decode steps,
// which read and update that state without the host. Slots are rows of the cache's block table.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "core/graph.h"
#include "core/readback.h"
#include "kernels/sampling.h"
#include "nn/transformer.h"
#include "rl/engine/scheduler.h"

namespace cohort {

// A token for each sequence, or an idle row's value for one that had ended. The copies to the host
// are in flight.
struct SampledTokens {
  Scheduler::Sequences sequences;
  Readback tokens;      // [n], n >= sequences.size()
  Readback statistics;  // [4, n]: in the order of kernels::Samples
};

class DecodeSlots {
 public:
  // Creates a slot for each row of `cache`.
  DecodeSlots(const Transformer& model, KVCache& cache, const SlotLimits& limits);
  ~DecodeSlots();

  const SlotLimits& limits() const { return limits_; }
  // Sets the slots of sequences. The cache holds all tokens of each but the last.
  void start(const Scheduler::Sequences& sequences);
  // Makes these slots idle: they sample nothing until they are started again.
  void stop(const std::vector<int32_t>& slots);
  // Samples a token for each sequence from its row of `hidden` [n, C] and advances its slot.
  SampledTokens sample(const Tensor& hidden, const Scheduler::Sequences& sequences);
  // Samples a token for each running sequence whose slot is not idle: that has been started, and
  // neither stopped nor ended.
  SampledTokens decode(const Scheduler::Sequences& running);

 private:
  struct Rows;
  struct Step;
  // Number of rows in a step that serves `sequences` sequences. A CUDA graph has a fixed number of
  // rows, so there are a few sizes, padded with idle rows.
  int64_t rows_for(size_t sequences) const;
  void sample_rows(Rows& rows, const Tensor& hidden);
  void start_biases(const Scheduler::Sequences& sequences, const Tensor& at);
  void start_counts(const Scheduler::Sequence& sequence);

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
  Scheduler::Sequences decoded_;  // sequences of the last step's rows; empty: to be set again
};

}  // namespace cohort
