// Reference accumulation order of bf16 GEMMs whose rows must not depend on the number of rows,
// implemented as the simplest kernel that has it. Other kernels are compared against it.
#pragma once

#include "kernels/matmul.h"

namespace cohort::kernels::cuda {

// Adds to `differing` the number of elements of c that are not bitwise equal to op(a) op(b) + bias
// with f32 accumulation over ascending k in steps of 16, one tensor core instruction each, and one
// rounding. Slow: every element is loaded separately.
struct AccumulationOrderCheck {
  Tensor& differing;   // [1] i32
  const Tensor& c;     // [M, N], bf16 or f32
  const Tensor& a;     // op(a): [M, K] bf16
  const Tensor& b;     // op(b): [K, N] bf16; both may be columns of a wider matrix
  const Tensor& bias;  // [N] bf16; may be undefined
  Transpose transpose_a = Transpose::kNo, transpose_b = Transpose::kNo;
};
void count_out_of_order(const AccumulationOrderCheck& args);

// True if linear_forward() accumulates x w^T + bias in this order for any number of rows of x, so
// that another kernel with this order may replace it.
bool linear_accumulates_in_order(const Tensor& x, const Tensor& w, const Tensor& bias);

// Throws Error unless the last work on the current stream is a kernel with Trigger::kLate, a copy
// or a call of cuBLAS, as linear_forward() requires of what wrote the tail of x. No-op without a
// tail or rows: nothing has been written then.
void check_tail(const Tensor& x, int64_t tail);

// rng_stream() purpose of the matrices of the comparison.
inline constexpr uint64_t kComparisonPurpose = 8;
// Fills a bf16 matrix with values from [-1, 1) that depend on the seed.
void fill_for_comparison(Tensor& t, uint64_t seed);

}  // namespace cohort::kernels::cuda
