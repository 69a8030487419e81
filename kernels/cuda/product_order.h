// The order in which products of bf16 matrices are summed wherever a row may not depend on how many
// rows there are, written down as the simplest kernel that keeps it: what other kernels are
// compared with.
#pragma once

#include "kernels/matmul.h"

namespace cohort::kernels::cuda {

// Adds to `differing` how many elements of c do not have the bits of op(a) op(b) + bias, with sums
// in f32 over ascending k in steps of 16, one tensor core instruction each, and one rounding. Slow:
// every element is loaded by itself.
struct ProductOrder {
  Tensor& differing;   // [1] i32
  const Tensor& c;     // [M, N], bf16 or f32
  const Tensor& a;     // op(a): [M, K] bf16
  const Tensor& b;     // op(b): [K, N] bf16
  const Tensor& bias;  // [N] bf16; may be undefined
  Transpose transpose_a = Transpose::kNo, transpose_b = Transpose::kNo;
};
void count_out_of_order(const ProductOrder& args);

// Whether linear_forward() adds x w^T + bias up in this order, however many rows x has: then
// another kernel that does may take its place.
bool linear_adds_in_order(const Tensor& x, const Tensor& w, const Tensor& bias);

// The purpose of rng_stream() for the matrices that products are compared on.
inline constexpr uint64_t kProductPurpose = 8;
// Fills a bf16 matrix with values from [-1, 1), other ones for another seed.
void fill_for_comparison(Tensor& t, uint64_t seed);

}  // namespace cohort::kernels::cuda
