// Multi-tensor optimiser kernels.
#pragma once

#include <span>

#include "kernels/common.h"

namespace cohort::kernels {

// A tensor of parameters with its gradient and moments, all of one shape. grad, m and v have
// accumulate_dtype(param); both moments may be bf16 if that is f32. A bf16 parameter has an f32
// master, to which the update is applied, and which is rounded into param, to nearest with halves
// away from zero (master_parts()). Param and `low_bits`, u8 [2 * elements], are the master
// together; low_bits is undefined for other parameters.
struct AdamWTensor {
  Tensor param, grad, m, v;
  double weight_decay = 0;
  Tensor low_bits = {};
  // Address of the first element: its unit, and its flat index (nn/parameter_set.h).
  uint64_t unit = 0;
  int64_t flat_index = 0;
};
struct AdamWDesc {
  double learning_rate = 0, beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  int64_t step = 1;  // from 1, for the bias correction
  // Seed of the stochastic rounding of moments to bf16, which keeps their expected value. The
  // random number of an element depends on the seed, the step, and the element's unit and flat
  // index: not on how elements are divided into tensors. The update itself uses the moments before
  // rounding.
  uint64_t seed = 0;
  // f64 [1], the norm over all gradients, on the tensors' device; may be undefined. If it is not
  // finite, nothing is written. If it exceeds a max_norm above 0, every gradient is multiplied by
  // max_norm / (norm + 1e-6), rounded to the gradient's dtype. It is read on the device, without
  // synchronisation.
  Tensor norm = {};
  double max_norm = 0;
  // f64 [1] on the tensors' device, an output; may be undefined. Becomes 1 if an updated weight
  // (the master or the rounded weight), m or v is not finite; unchanged otherwise.
  Tensor non_finite = {};
};
// AdamW with decoupled decay (Loshchilov and Hutter 2019), in PyTorch's order of operations:
//   p -= lr wd p;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
//   p -= lr / (1 - b1^step) m / (sqrt(v) / sqrt(1 - b2^step) + eps)
// f32 gives the same bits on the CPU and on CUDA, and so do bf16 moments. All tensors are on one
// device.
COHORT_KERNEL(void adamw_step(std::span<AdamWTensor> tensors, const AdamWDesc& desc));

// norm[0] (f64) = sqrt(sum of squares over all tensors), accumulated in f64 over fixed blocks. The
// tensors are on norm's device: f32 or, on the CPU, f64. NaN and Inf propagate.
COHORT_KERNEL(void grad_norm(Tensor& norm, std::span<const Tensor> tensors));

// The f32 master of a bf16 parameter and its low bits, and the inverse. All are on the CPU.
Tensor combine_master(const Tensor& param, const Tensor& low_bits);
void split_master(Tensor& param, Tensor& low_bits, const Tensor& master);

}  // namespace cohort::kernels
