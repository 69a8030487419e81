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
  // Zero moments; bf16 parameters get f32 masters, split or whole. Refers to the parameters'
  // gradients, which must stay where they are. `seed`: for the rounding of bf16 moments.
  AdamW(const std::vector<NamedParameter>& parameters, const OptimizerConfig& config,
        uint64_t seed = 0);
  // One update, with gradients scaled down if their norm (global_grad_norm(), or undefined: no
  // clipping) exceeds max_grad_norm. A norm that is not finite makes no update. Sets
  // non_finite (f64 [1], may be undefined) to 1 if an updated weight or moment is not finite.
  void step(double learning_rate, const Tensor& norm, const Tensor& non_finite = {});
  int64_t updates() const { return updates_; }
  // |dw| / |w| of the last update, with this learning rate, from a sample of the elements of each
  // parameter; NaN before the first. Synchronizes with the device.
  double relative_update(double learning_rate) const;

  // "NAME.m", "NAME.v" and, if it has one, the f32 "NAME.master" of every parameter, always whole:
  // split masters are combined on the CPU. load() also rounds masters into their parameters, and
  // f32 moments to nearest if they are bf16 here; it throws InputError if a tensor is missing, has
  // another shape or is not finite.
  NamedTensors state() const;
  void load(const SafetensorsFile& file, int64_t updates);

 private:
  OptimizerConfig config_;
  uint64_t seed_;
  std::vector<std::string> names_;
  std::vector<kernels::AdamWTensor> tensors_;
  int64_t updates_ = 0;
};

// Learning rate of `step` (from 0) of `steps`: linear warm-up to the peak at step warmup_steps,
// then the schedule, which would reach min_learning_rate at step `steps`: the last step still
// trains.
double scheduled_learning_rate(const OptimizerConfig& config, int64_t step, int64_t steps);

// The norm of all gradients together; norm: f64 [1] on their device.
void global_grad_norm(Tensor& norm, const std::vector<NamedParameter>& parameters);

}  // namespace cohort
