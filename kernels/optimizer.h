// Multi-tensor optimiser kernels.
#pragma once

#include <span>

#include "kernels/common.h"

namespace cohort::kernels {

// One parameter with its gradient and moments: equal shapes and dtypes.
struct AdamWTensor {
  Tensor param, grad, m, v;
  double weight_decay = 0;
};
struct AdamWDesc {
  double learning_rate = 0, beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  int64_t step = 1;       // from 1, for the bias correction
  double grad_scale = 1;  // multiplies every gradient (clipping)
};
// AdamW with decoupled decay (Loshchilov and Hutter 2019), in PyTorch's order of operations:
//   p -= lr wd p;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
//   p -= lr / (1 - b1^step) m / (sqrt(v) / sqrt(1 - b2^step) + eps)
void adamw_step(std::span<AdamWTensor> tensors, const AdamWDesc& desc);

// norm[0] (f64) = sqrt(sum of squares over all tensors), accumulated in f64 over fixed blocks. NaN
// or Inf propagate.
void grad_norm(Tensor& norm, std::span<const Tensor> tensors);

}  // namespace cohort::kernels
