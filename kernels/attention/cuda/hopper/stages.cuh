// What the kernels for sm_90 share: tiles that one warpgroup copies in stages, and others work on.
#pragma once

#include "kernels/cuda/tma.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace cohort::kernels::cuda {
namespace {

constexpr int kStages = 2, kWarpgroup = 128;

// Tile number i of a block uses this stage, for the time `turn`.
struct Turn {
  int stage;
  uint32_t parity;
  __device__ explicit Turn(int i)
      : stage(i % kStages), parity(static_cast<uint32_t>(i / kStages % 2)) {}
};

// Copies by some warps of a block. What a group of copies has brought is made known one group
// later, so that two are under way at a time: when the thread's own copies have ended, what they
// wrote is shown to the tensor cores, and the thread arrives.
class Producer {
 public:
  // Ends a group of copies; those that wait at `barrier` may read when it is there.
  __device__ __forceinline__ void submit(uint32_t barrier) {
    copy_async_commit();
    if (waiting_ != 0) {
      copy_async_wait<1>();
      show();
    }
    waiting_ = barrier;
  }
  // Waits until a stage is empty; what is under way is made known first, since those who empty the
  // stage may wait for it.
  __device__ __forceinline__ void wait_empty(uint32_t barrier, uint32_t parity) {
    if (barrier_is_done(barrier, parity)) return;
    finish();
    barrier_wait(barrier, parity);
  }
  __device__ __forceinline__ void finish() {
    if (waiting_ == 0) return;
    copy_async_wait<0>();
    show();
    waiting_ = 0;
  }

 private:
  __device__ __forceinline__ void show() {
    fence_before_tma();  // also orders what was written before reads by the tensor cores
    barrier_arrive(waiting_);
  }
  uint32_t waiting_ = 0;
};

// The first kThreads threads of the block begin to copy kRows rows of kDim values to panels;
// row_of(r): where row r starts, null: zeros.
template <int kDim, int kRows, int kThreads, class RowOf>
__device__ __forceinline__ void copy_rows(uint32_t to, RowOf&& row_of) {
  constexpr int kChunks = kDim / 8, kAtOnce = kThreads / kChunks;
  const int thread = static_cast<int>(threadIdx.x);
  const int chunk = thread % kChunks;
#pragma unroll 4
  for (int r = thread / kChunks; r < kRows; r += kAtOnce) {
    const __nv_bfloat16* const row = row_of(r);
    copy_async(to + panel_offset<kRows>(r, chunk), row != nullptr ? row + 8 * chunk : nullptr,
               row != nullptr ? 16 : 0);
  }
}

// A warp's first thread arrives when all of its threads are here.
__device__ __forceinline__ void release(uint32_t barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// A number that all threads of a warp have, where the compiler does not see that: what depends on
// it alone takes one register for the warp.
__device__ __forceinline__ int uniform(int x) {
  return __shfl_sync(0xffffffffu, x, 0);
}

}  // namespace
}  // namespace cohort::kernels::cuda
