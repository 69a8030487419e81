// Plans the memory of a stage: what it needs, what `auto` of its configuration stands for, and
// whether it runs on a GPU that this machine need not have.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "core/gpu.h"
#include "core/sizes.h"
#include "job/preview.h"
#include "nn/memory.h"

namespace cohort {

// Upper bounds for the size of a step.
struct StepSize {
  int64_t tokens = 0;            // over all ranks
  int64_t longest_sequence = 0;  // inputs of the model
  MemoryShape memory;            // per rank
  int64_t micro_batches() const {
    return ceil_div(tokens, std::max<int64_t>(1, memory.micro_batch_tokens));
  }
};
StepSize step_size(const TrainConfig& config, const StagePreview& stage, int64_t ranks);

// The memory of a rank, with a cache for one sequence or for the whole rollout.
enum class CacheSize { kSequence, kRollout };
MemoryEstimate memory_of(const TrainConfig& config, const StagePreview& stage, int64_t ranks,
                         CacheSize cache = CacheSize::kRollout);

// Bytes of a GPU that NCCL takes for `ranks` GPUs, when the first update sends; 0 for one.
int64_t nccl_bytes(int64_t ranks);
// Bytes that are free for each rank.
struct FreeMemory {
  int64_t device = 0, host = 0;
};
// Values and reasons of what choose_by_memory() has chosen, human-readable.
struct MemoryChoice {
  std::string micro_batch;  // empty: micro_batch_tokens is a number
  std::string place;        // empty: optimizer.place is given, or the device
  std::string sharding;     // empty: `sharding` is given, or none
};
// Chooses for `sharding: auto` on several GPUs: the first of optimizer, gradients and full that
// fits with the state on the device, else full; with reduction_lanes: optimizer. Then for
// `optimizer.place: auto`: the device if all fits there without recomputing whole blocks that need
// not be; else the memory of the host, if that makes it fit, for as few units of the model as leave
// room for the micro batches and the whole cache of a rollout.
// Then for `micro_batch_tokens: auto`, and for model.recompute: the least recomputation, from the
// configured one on, with which 8,192 tokens (or all of a rank's) fit, then as many tokens as fit,
// up to 32,768, but at least a sequence.
MemoryChoice choose_by_memory(TrainConfig& config, const StagePreview& stage, int64_t ranks,
                              const FreeMemory& free);

// Seconds that an update waits for optimizer state of `bytes` in the host's memory to pass through
// the device and back, over PCIe 5.0 x16 (bench/results/h200.md).
inline double streaming_seconds(int64_t bytes) {
  return static_cast<double>(bytes) / 41.6e9;
}
// Number of units of a model's ParameterSet: the tables, each block, the end.
inline int64_t num_units(const ModelConfig& model) {
  return model.num_layers + 2;
}
// Optimiser updates of a step.
int64_t updates_per_step(const TrainConfig& config);
// Says that streaming takes more than half as long as the rest of an update, with a hint; "" if it
// does not.
std::string slow_streaming(double streaming_seconds, double other_seconds);

struct GpuPlan {
  // The configuration that is planned: the first one tried that fits, or the last one.
  TrainConfig config;
  MemoryEstimate memory;  // per rank, with the cache that the engine would take
  int64_t usable = 0;     // bytes of the GPU for a rank's tensors
  // It fits as it was given, where micro_batch_tokens: auto has the value that it chooses.
  bool runs = false;
  int64_t given = 0;     // bytes that it needs as it was given
  std::string changes;   // overrides with which it fits: "micro_batch_tokens=2048 ..."; empty: none
  std::string shortage;  // explains that nothing tried fits, with a hint; empty: it fits
};

// Tries the stage as it is given; then with micro_batch_tokens: auto, which may choose another
// model.recompute; then also with optimizer.moments: bf16; then with optimizer.place: auto; then
// with adapters in place of these (lora.rank: 16). `ranks` GPUs are alike; the `ranks` threads of a
// configuration share one GPU.
GpuPlan plan_for_gpu(const TrainConfig& config, const StagePreview& stage, int64_t ranks,
                     const GpuProperties& gpu);

// Memory of `generate`, `chat` and `eval` of the model in bf16 on the GPU, for sequences of
// `length` tokens.
struct InferencePlan {
  int64_t weights = 0;       // bytes
  int64_t cache_tokens = 0;  // that the cache may hold; 0: less than one sequence fits
  int64_t sequences = 0;     // that it may hold at once
  int64_t state = 0;         // bytes of a sequence's states in delta layers
};
InferencePlan plan_inference(const ModelConfig& model, int64_t length, const GpuProperties& gpu);

// Estimated peak of the host's memory with `processes` ranks on it, in bytes: a process, its CUDA
// context, optimizer state that is there, and the largest tensor of it that a checkpoint puts
// together.
int64_t host_memory(const TrainConfig& config, const ModelConfig& model, int64_t processes);

// slow_streaming() of optimizer state of `pinned` bytes in the host's memory beside an update of
// `flops` on the GPU, whose compute time is estimated.
std::string streaming_note(int64_t pinned, double flops, const GpuProperties& gpu);

// Warnings about sizes of the model on a GPU that are no multiples of 8, with the factor by which
// they slow a training step down where it was measured.
std::vector<std::string> slow_sizes(const ModelConfig& model);

}  // namespace cohort
