// What the kernels for sm_90 share: tiles that one warpgroup copies in stages, and others work on.
#pragma once

#include "kernels/cuda/tma.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace cohort::kernels::cuda {
namespace {

constexpr int kStages = 2;

// Columns of shared memory that a head of kDim takes: whole panels.
template <int kDim>
inline constexpr int kPanelColumns = (kDim + 63) / 64 * 64;

// The first kThreads threads of the block begin to copy kRows rows of `head_dim` values, a multiple
// of 8, to panels of kColumns; row_of(r): where row r starts, null: zeros. Zeros, too, are the
// columns beyond the head dim.
template <int kColumns, int kRows, int kThreads, class RowOf>
__device__ __forceinline__ void copy_rows(uint32_t to, int head_dim, RowOf&& row_of) {
  constexpr int kChunks = kColumns / 8, kAtOnce = kThreads / kChunks;
  const int thread = static_cast<int>(threadIdx.x);
  if (kThreads % kChunks != 0 && thread >= kAtOnce * kChunks) return;
  const int chunk = thread % kChunks;
  const bool inside = 8 * chunk < head_dim;
#pragma unroll 2
  for (int r = thread / kChunks; r < kRows; r += kAtOnce) {
    const __nv_bfloat16* const row = row_of(r);
    const bool live = inside && row != nullptr;
    copy_async(to + panel_offset<kRows>(r, chunk), live ? row + 8 * chunk : nullptr, live ? 16 : 0);
  }
}

// Heads of a tensor [tokens, heads, head_dim] as the copy engine sees them, in boxes of
// `box_tokens` tokens of 64 columns of one head. Columns beyond the head dim become zeros.
inline CUtensorMap describe_heads(const Tensor& t, int box_tokens) {
  const auto size = [&](int i) { return static_cast<cuuint64_t>(t.dim(i)); };
  const cuuint64_t head = size(2) * sizeof(__nv_bfloat16),
                   token = static_cast<cuuint64_t>(t.strides()[0]) * sizeof(__nv_bfloat16);
  return tma_describe({.t = t,
                       .sizes = {size(2), size(1), size(0), 1},
                       .strides = {head, token, token * size(0)},
                       .box = {64, 1, static_cast<cuuint32_t>(box_tokens), 1}});
}

// The same number, of which the compiler knows nothing: what depends on it is computed where it
// stands, and takes no register before. For what happens rarely inside a loop.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace
}  // namespace cohort::kernels::cuda
