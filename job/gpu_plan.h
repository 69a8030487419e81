// Plans a stage for a GPU that this machine need not have.
#pragma once

#include <string>
#include <vector>

#include "core/gpu.h"
#include "job/preview.h"

namespace cohort {

struct GpuPlan {
  // The configuration that is planned: of those tried, the first that fits, else the last.
  TrainConfig config;
  MemoryEstimate memory;  // per rank, with the cache that the engine would take
  int64_t usable = 0;     // bytes of the GPU for a rank's tensors
  // It fits as it was given, where micro_batch_tokens: auto counts as whatever it chooses.
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
