// AdamW over a model's parameters, learning rate schedules and gradient clipping.
#pragma once

#include <vector>

#include "data/safetensors.h"
#include "kernels/optimizer.h"
#include "nn/transformer.h"
#include "trainers/config.h"

namespace cohort {

class AdamW {
 public:
  // Zero moments. Refers to the parameters' gradients, which must stay where they are.
  AdamW(const std::vector<NamedParameter>& parameters, const OptimizerConfig& config);
  // One update with gradients multiplied by grad_scale.
  void step(double learning_rate, double grad_scale);
  int64_t updates() const { return updates_; }

  // "NAME.m" and "NAME.v" of every parameter; load() throws InputError if one is missing or has
  // another shape.
  NamedTensors state() const;
  void load(const SafetensorsFile& file, int64_t updates);

 private:
  OptimizerConfig config_;
  std::vector<std::string> names_;
  std::vector<kernels::AdamWTensor> tensors_;
  int64_t updates_ = 0;
};

// Learning rate of `step` (from 0) of `steps`: linear warm-up to the peak at step warmup_steps,
// then the schedule, which reaches min_learning_rate at the last step.
double scheduled_learning_rate(const OptimizerConfig& config, int64_t step, int64_t steps);

// The global gradient norm and the factor that brings it down to max_norm (1 if it is below, or
// max_norm is 0).
struct ClippedNorm {
  double norm = 0, scale = 1;
};
ClippedNorm clip_grad_norm(const std::vector<NamedParameter>& parameters, double max_norm);

}  // namespace cohort
