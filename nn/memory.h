// Memory estimate of a training run from its configuration: the tensors of a step in a dry run
// (core/dry_run.h), counted with the allocator's size classes. Kernel workspaces are not counted.
#pragma once

#include <algorithm>
#include <optional>

#include "nn/transformer.h"

namespace cohort {

struct MemoryEstimate {
  int64_t parameters = 0;  // with the model's constant tables
  int64_t optimizer = 0, reference = 0;
  int64_t gradients = 0;              // during an update only
  int64_t weights = 0, released = 0;  // as in MemoryShape
  int64_t activations = 0;            // kept for the backward of one micro batch
  int64_t workspace = 0;              // additional peak of that backward
  int64_t optimizer_workspace = 0;    // after the last backward of an update
  int64_t cache = 0;                  // keys and values, and states of delta layers
  int64_t states = 0;                 // those states alone
  int64_t sequences = 0;              // that are sampled at once
  // Activations while sampling; not held at the same time as those of training.
  int64_t rollout = 0;
  // The cache's memory is also available to updates (KVCache::release_to_pool()).
  bool releases_cache = false;
  int64_t persistent() const { return parameters + optimizer + reference; }
  int64_t update() const {
    return std::max(weights, weights - released + gradients +
                                 std::max(activations + workspace, optimizer_workspace));
  }
  int64_t peak() const {
    return persistent() + std::max(update() + (releases_cache ? 0 : cache), rollout + cache);
  }
};

struct MemoryShape {
  int64_t micro_batch_tokens = 0;  // in the largest micro batch
  double targets = 1;              // share of them that have a target
  int64_t rollout_sequences = 0;   // sampled concurrently; 0: no sampling
  int64_t rollout_length = 0;      // maximum tokens per sequence
  int64_t rollout_prefill_tokens = 0;
  int64_t max_cache_tokens = 0;  // limit of the cache, at least a sequence's; 0: none
  // A model that is held beside the one in training; nullopt: none.
  std::optional<ModelConfig> reference = {};
  bool distills = false;  // the head holds logits of the reference beside its own
  // Bytes: OptimizerBytes::memory, workspace and gradients; 0 gradients: those of one rank.
  int64_t optimizer = 0, optimizer_workspace = 0, gradients = 0;
  // Bytes: OptimizerBytes::weights and released.
  int64_t weights = 0, released = 0;
  Device device = {};
};

// Throws InputError for sizes whose bytes do not fit in 64 bits.
MemoryEstimate estimate_memory(const ModelConfig& config, DType dtype, const MemoryShape& shape);

// In a dry run (core/dry_run.h): a batch of `tokens` tokens in one sequence, of which the share
// `targets` has a target.
PackedBatch dry_batch(const ModelConfig& config, int64_t tokens, double targets, Device device);

}  // namespace cohort
