// Sums of rows. The order of a sum depends on the length of the row only.
#pragma once

#include "kernels/common.h"

namespace cohort::kernels {

// y[r] = sum over c of x[r, c]
struct RowSumForward {
  Tensor& y;        // [...], accumulate_dtype(x)
  const Tensor& x;  // [..., C], C at least 1
};
COHORT_KERNEL(void row_sum_forward(const RowSumForward& args));

// dx[r, c] (+)= dy[r]
struct RowSumBackward {
  GradOut dx;        // [..., C], f32 or bf16 on CUDA
  const Tensor& dy;  // [...], accumulate_dtype(dx)
};
COHORT_KERNEL(void row_sum_backward(const RowSumBackward& args));

// The shape of y.
inline Shape row_sum_shape(Shape x) {
  x.erase(-1);
  return x;
}

}  // namespace cohort::kernels
