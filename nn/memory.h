// What a training run needs of memory, from its configuration alone: the tensors of a step in a dry
// run (core/dry_run.h), counted with the allocator's size classes. What kernels take for themselves
// is left out, but for the head's logits.
#pragma once

#include <algorithm>

#include "nn/transformer.h"

namespace cohort {

struct MemoryEstimate {
  int64_t parameters = 0, gradients = 0, optimizer = 0, reference = 0;
  int64_t activations = 0;  // kept for the backward of one micro batch
  int64_t workspace = 0;    // of that micro batch's backward
  int64_t cache = 0;        // of keys and values
  // Activations while sampling; not held at the same time as those of training.
  int64_t rollout = 0;
  bool lends_cache = false;  // its memory serves the micro batches too (Allocator::lend)
  int64_t persistent() const { return parameters + gradients + optimizer + reference; }
  int64_t peak() const {
    return persistent() +
           std::max(activations + workspace + (lends_cache ? 0 : cache), rollout + cache);
  }
};

struct MemoryShape {
  int64_t micro_batch_tokens = 0;  // of the largest micro batch
  int64_t rollout_sequences = 0;   // sampled at once; 0: no sampling
  int64_t rollout_length = 0;      // tokens each can reach
  int64_t rollout_prefill_tokens = 0;
  enum class Reference { kNone, kHeld } reference = Reference::kNone;
  bool whole_masters = false;  // of bf16 weights: f32, not 16 bits beside the weight
  bool bf16_moments = false;   // where sums are f32
  Device device = {};
};

// Throws InputError for sizes whose bytes 64 bits do not count.
MemoryEstimate estimate_memory(const ModelConfig& config, DType dtype, const MemoryShape& shape);

}  // namespace cohort
