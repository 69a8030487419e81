// Row normalisations over the last dimension. Statistics and weight gradients are
// accumulate_dtype() of x; outputs in x's dtype are rounded once.
#pragma once

#include "kernels/common.h"

namespace cohort::kernels {

// y[r, :] = x[r, :] rstd[r] (w + weight_offset),  rstd[r] = 1 / sqrt(mean(x[r, :]^2) + eps)
// (Zhang and Sennrich 2019). Gemma's norms have an offset of 1. x, y and their gradients may be
// columns of wider tensors, such as the queries of qkv: x[i] has any stride. So may y in the other
// forwards.
struct RmsNormForward {
  Tensor& y;        // [..., C]; may be x
  Tensor& rstd;     // [rows], kept for the backward
  const Tensor& x;  // [..., C]
  const Tensor& w;  // [C]
  double eps;
  double weight_offset = 0;
};
COHORT_KERNEL(void rms_norm_forward(const RmsNormForward& args));

// dw is summed over rows in an order that depends only on the shape and, on CUDA, the element size.
struct RmsNormBackward {
  GradOut dx, dw;
  const Tensor &dy, &x, &w, &rstd;
  double weight_offset = 0;
};
COHORT_KERNEL(void rms_norm_backward(const RmsNormBackward& args));

// y[r, :] = (x[r, :] - mean[r]) rstd[r] w + b   (Ba et al. 2016)
struct LayerNormForward {
  Tensor& y;            // [..., C]
  Tensor &mean, &rstd;  // [rows], kept for the backward
  const Tensor& x;      // [..., C]
  const Tensor &w, &b;  // [C]; b may be undefined
  double eps;
};
COHORT_KERNEL(void layer_norm_forward(const LayerNormForward& args));

struct LayerNormBackward {
  GradOut dx, dw, db;
  const Tensor &dy, &x, &w, &mean, &rstd;
};
COHORT_KERNEL(void layer_norm_backward(const LayerNormBackward& args));

// A residual step and the norm after it in one pass: sum = a + b, rounded to the dtype, and the
// norm of `sum`. The bits are those of add_forward() followed by the norm. `sum` may be a or b.
struct AddRmsNormForward {
  Tensor &sum, &y, &rstd;
  const Tensor &a, &b, &w;
  double eps;
  double weight_offset = 0;
};
COHORT_KERNEL(void add_rms_norm_forward(const AddRmsNormForward& args));

struct AddLayerNormForward {
  Tensor &sum, &y, &mean, &rstd;
  const Tensor &a, &b, &w, &bias;
  double eps;
};
COHORT_KERNEL(void add_layer_norm_forward(const AddLayerNormForward& args));

}  // namespace cohort::kernels
