// Shared by the kernels for sm_90: tiles that a producer loads in stages and consumers process.
#pragma once

#include "kernels/attention/score_rule.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/sm90/pipeline.cuh"
#include "kernels/cuda/sm90/wgmma.cuh"

namespace cohort::kernels::cuda {
namespace {

constexpr int kStages = 2;

// Masks without modified scores have kernels of their own for heads of 64 and 128 columns.
template <int kDim>
using MaskRuleFor =
    std::conditional_t<kDim == 64 || kDim == 128, MaskRule<float>, ModifyRule<float>>;

// Columns of shared memory per head of kDim: whole panels.
template <int kDim>
inline constexpr int kPanelColumns = (kDim + 63) / 64 * 64;

// The first kThreads threads of the block start copying kRows rows of `head_dim` values, a multiple
// of 8, to panels of kColumns. row_of(r): start of row r, null for zeros. Columns beyond the head
// dim become zero.
template <int kColumns, int kRows, int kThreads, class RowOf>
__device__ __forceinline__ void copy_rows(uint32_t to, int head_dim, RowOf&& row_of) {
  constexpr int kChunks = kColumns / 8, kAtOnce = kThreads / kChunks;
  const int thread = static_cast<int>(threadIdx.x);
  if (kThreads % kChunks != 0 && thread >= kAtOnce * kChunks) return;
  const int chunk = thread % kChunks;
  const bool inside = 8 * chunk < head_dim;
#pragma unroll 2
  for (int r = thread / kChunks; r < kRows; r += kAtOnce) {
    const bf16* const row = row_of(r);
    const bool live = inside && row != nullptr;
    copy_async(to + panel_offset<kRows>(r, chunk), live ? row + 8 * chunk : nullptr, live ? 16 : 0);
  }
}

// Tensor map of a tensor [tokens, heads, head_dim], with boxes of `box_tokens` tokens and 64
// columns of one head. Columns beyond the head dim read as zeros.
inline CUtensorMap make_head_map(const Tensor& t, int box_tokens) {
  const auto size = [&](int i) { return static_cast<cuuint64_t>(t.dim(i)); };
  const auto stride = [&](int i) { return static_cast<cuuint64_t>(t.strides()[i]) * sizeof(bf16); };
  return make_tensor_map({.t = t,
                          .sizes = {size(2), size(1), size(0), 1},
                          .strides = {stride(1), stride(0), stride(0) * size(0)},
                          .box = {64, 1, static_cast<cuuint32_t>(box_tokens), 1}});
}

template <int kN>
__device__ __forceinline__ void set_zero(float (&acc)[kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[n][i] = 0;
}

// Identity that the compiler cannot see through: values derived from it are computed at the point
// of use instead of occupying registers. For rare paths inside a loop.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace
}  // namespace cohort::kernels::cuda
