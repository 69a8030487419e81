// Skinny GEMM (few rows): limited by the bandwidth of reading the weights, and bitwise equal to
// cuBLASLt's GEMM for any number of rows.
#pragma once

#include "kernels/activation.h"
#include "kernels/quantized_weight.h"

namespace cohort::kernels::cuda {

// y = x w^T + bias in bf16 with f32 accumulators: k in ascending steps of 16, the bias added before
// the one rounding. Overwrites y. All three matrices may be columns of wider ones.
struct SkinnyGemm {
  Tensor& y;           // [M, N], bf16 or f32
  const Tensor& x;     // [M, K] bf16; M up to kSkinnyRows
  const Tensor& w;     // [N, K] bf16
  const Tensor& bias;  // [N] bf16; may be undefined
  int64_t tail = 0;    // as in LinearForward
};
void skinny_gemm(const SkinnyGemm& args);

// Maximum number of rows; for more, cuBLASLt is as fast.
inline constexpr int64_t kSkinnyRows = 64;
// True if skinny_gemm() supports these sizes on this device: K a multiple of 64, N of 8, code
// compiled for sm_90 or newer, and sizes for which it was measured to be faster than cuBLASLt
// (bench/results/h200.md). All tensors and their rows start at multiples of 16 bytes.
struct GemmSize {
  int64_t m, n, k;
};
bool is_skinny(const GemmSize& size, Device device);

// y = op(gate, up) in bf16, where gate | up = x w^T + bias is rounded as by skinny_gemm(); y is
// [M, N / 2]. In is_gated_skinny() n is the number of rows of w.
void gated_skinny_gemm(const SkinnyGemm& args, Activation op);
bool is_gated_skinny(const GemmSize& size, Device device);

// quantized_linear() with the pipeline of skinny_gemm().
void quantized_skinny_gemm(const QuantizedLinear& args);
// True if it takes these of the calls that reads_quantized() allows: those with a tail that is a
// multiple of 64, if the device has sm_90 or newer and code was compiled for it.
bool is_quantized_skinny(Device device, int64_t rows, const QuantizedWeight& w, int64_t tail);

}  // namespace cohort::kernels::cuda
