// Multi-tensor optimiser kernels.
#pragma once

#include <span>

#include "kernels/common.h"

namespace cohort::kernels {

// One parameter with its gradient and moments, all of one shape. grad, m and v have
// accumulate_dtype(param); both moments may be bf16 where that is f32. A bf16 parameter stands
// for an f32 master, which takes the update and is rounded into param, to nearest and halves
// away from zero (master_parts()). It comes with one of two, the other is undefined: the master,
// or its low bits, u8 [2 * elements], which together with param are the master. The bits of an
// update are the same.
struct AdamWTensor {
  Tensor param, grad, m, v;
  double weight_decay = 0;
  Tensor master = {}, low_bits = {};
};
struct AdamWDesc {
  double learning_rate = 0, beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  int64_t step = 1;  // from 1, for the bias correction
  // Of the draws by which moments are rounded to bf16: up or down with the probabilities of their
  // distances, so that what is added to them is not lost on average. The draw of an element depends
  // on seed, step, place of the tensor among all, and the element's. The update itself takes the
  // moments before they are rounded.
  uint64_t seed = 0;
  // f64 [1], the norm over all gradients, on the tensors' device; may be undefined. Where it is not
  // finite nothing is written. Where it exceeds a max_norm above 0, every gradient is multiplied by
  // max_norm / (norm + 1e-6), rounded to the gradient's dtype. Read on the device: no
  // synchronisation.
  Tensor norm = {};
  double max_norm = 0;
  // f64 [1] on the tensors' device, an output; may be undefined. Becomes 1 where an updated weight
  // (the master or its rounded one), m or v is not finite, and else stays as it is.
  Tensor non_finite = {};
};
// AdamW with decoupled decay (Loshchilov and Hutter 2019), in PyTorch's order of operations:
//   p -= lr wd p;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
//   p -= lr / (1 - b1^step) m / (sqrt(v) / sqrt(1 - b2^step) + eps)
// f32 gives the same bits on the CPU and on CUDA, so do bf16 moments. All tensors are on one
// device.
void adamw_step(std::span<AdamWTensor> tensors, const AdamWDesc& desc);

// norm[0] (f64) = sqrt(sum of squares over all tensors), which are on norm's device, accumulated in
// f64 over fixed blocks. NaN or Inf propagate.
void grad_norm(Tensor& norm, std::span<const Tensor> tensors);

// A master [...] f32 of a bf16 parameter and its low bits, and these taken from a master. All are
// on the CPU.
Tensor join_master(const Tensor& param, const Tensor& low_bits);
void split_master(Tensor& param, Tensor& low_bits, const Tensor& master);

namespace cpu {
void adamw_step(std::span<AdamWTensor> tensors, const AdamWDesc& desc);
void grad_norm(Tensor& norm, std::span<const Tensor> tensors);
}  // namespace cpu

namespace cuda {
void adamw_step(std::span<AdamWTensor> tensors, const AdamWDesc& desc);
void grad_norm(Tensor& norm, std::span<const Tensor> tensors);
}  // namespace cuda

}  // namespace cohort::kernels
