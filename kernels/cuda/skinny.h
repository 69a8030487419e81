// Products of few rows by a kernel of our own: at the speed at which the weights can be read, with
// the bits that cuBLASLt's products have at any number of rows.
#pragma once

#include "kernels/activation.h"

namespace cohort::kernels::cuda {

// y = x w^T + bias in bf16, with the sums in f32: k in ascending steps of 16, the bias added before
// the one rounding. Overwrites y.
struct SkinnyProduct {
  Tensor& y;           // [M, N], bf16 or f32
  const Tensor& x;     // [M, K] bf16; M up to kSkinnyRows
  const Tensor& w;     // [N, K] bf16
  const Tensor& bias;  // [N] bf16; may be undefined
};
void skinny_product(const SkinnyProduct& args);

// For more rows cuBLASLt is as fast.
inline constexpr int64_t kSkinnyRows = 64;
// Whether skinny_product() takes these sizes on this device: K a multiple of 128, N of 8, a GPU
// from sm_90 on that the program was compiled for, and sizes for which it was measured to be faster
// than cuBLASLt (bench/results/h200.md). All tensors start at multiples of 16 bytes.
struct SkinnySize {
  int64_t m, n, k;
};
bool is_skinny(const SkinnySize& size, Device device);

// y = op(gate, up) in bf16, where gate | up = x w^T + bias as skinny_product() rounds it; y is [M,
// N / 2]. In is_gated_skinny() n is that of w, too.
void gated_skinny_product(const SkinnyProduct& args, Activation op);
bool is_gated_skinny(const SkinnySize& size, Device device);

}  // namespace cohort::kernels::cuda
