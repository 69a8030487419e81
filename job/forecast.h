// A forecast of how long a step takes on GPUs that this machine need not have, from sizes, data
// sheets and the efficiency that steps on an H200 have (bench/results/h200.md).
#pragma once

#include <optional>

#include "core/gpu.h"
#include "job/memory_plan.h"

namespace cohort {

// GPUs of one kind, with a rank each, and as many on each host.
struct Cluster {
  GpuProperties gpu;
  int64_t ranks = 1, hosts = 1;
};

// Bytes that each rank sends to others in an update: counted in the calls of a dry one.
struct UpdateTraffic {
  int64_t gradients = 0, weights = 0;
  double far = 0;         // the share of `gradients` that goes to other hosts
  int64_t blocks = 0;     // the part of `weights` that is sent beside forward and backward
  int64_t exchanges = 0;  // calls that exchange a few numbers in the memory of hosts
};
// `stage`: with the model as `config` trains it; so below.
UpdateTraffic update_traffic(const TrainConfig& config, const StagePreview& stage, int64_t ranks,
                             int64_t hosts = 1);

// Seconds of a step without rewards and evaluations, of the rank that has most to do; completions
// have the maximum length.
struct StepForecast {
  // Rollouts (grpo), forward and backward, AdamW, and collectives that nothing hides.
  double rollout = 0, update = 0, optimizer = 0, communication = 0;
  double balance = 1;              // tokens of that rank, relative to the mean
  double tokens = 0, scaling = 1;  // per second over all ranks, and relative to one GPU
  double save = 0, days = 0;       // seconds of a checkpoint; days of all steps and checkpoints
  double step() const { return rollout + update + optimizer + communication; }
};
// nullopt for dtypes other than bf16, and for a GPU whose bandwidths are unknown. `memory`: that of
// a rank.
std::optional<StepForecast> forecast_step(const TrainConfig& config, const StagePreview& stage,
                                          const MemoryEstimate& memory, const Cluster& cluster);

}  // namespace cohort
