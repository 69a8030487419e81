// Rung 4 of the GEMM: tensor cores by mma.sync, with operands loaded by asynchronous copies.
//
// A block computes 128 x 128 of C, each of its four warps 64 x 64. While the warps multiply 64
// columns of A and B, cp.async loads those of the next steps: a pipeline of stages in shared memory
// hides the latency of global memory. ldmatrix loads the operand registers without bank conflicts,
// because the 16-byte chunks of a row are swizzled.
#include "bench/ladder/ladder.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/mma.cuh"

namespace cohort::bench::ladder {
namespace {

using namespace kernels::cuda;
using Element = __nv_bfloat16;

constexpr int kThreads = 128, kTile = 128, kStep = 64, kStages = 3;
constexpr int kOperandBytes = kTile * kStep * 2, kStageBytes = 2 * kOperandBytes;
constexpr int kWarpTile = kTile / 2;

// Swizzled byte offset of a chunk of 8 values of a row in an operand's tile.
__device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) {
  return static_cast<uint32_t>(row * 128 + (((chunk ^ row) & 7) << 4));
}

// Starts copying columns [k0, k0 + kStep) of kTile rows from row0; zeros past the end.
__device__ __forceinline__ void copy_operand(uint32_t to, const Element* from, int row0, int rows,
                                             int k0, int k) {
  constexpr int kChunks = kStep / 8;
  const int thread = static_cast<int>(threadIdx.x), chunk = thread % kChunks;
  const int column = k0 + 8 * chunk;
#pragma unroll
  for (int r = thread / kChunks; r < kTile; r += kThreads / kChunks) {
    const bool inside = row0 + r < rows && column < k;
    copy_async(to + chunk_offset(r, chunk),
               inside ? from + int64_t{row0 + r} * k + column : nullptr, inside ? 16 : 0);
  }
}

__global__ void __launch_bounds__(kThreads, 2)
    mma_kernel(const Element* a, const Element* b, Element* c, int m, int n, int k) {
  extern __shared__ __align__(1024) char memory[];
  const uint32_t shared = shared_address(memory);
  const int row0 = static_cast<int>(blockIdx.y) * kTile,
            column0 = static_cast<int>(blockIdx.x) * kTile;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warp_row = warp / 2 * kWarpTile, warp_column = warp % 2 * kWarpTile;
  const int steps = (k + kStep - 1) / kStep;
  // One commit group per step, empty past the last step, so that the number of pending groups
  // identifies the steps that are complete.
  const auto copy_step = [&](int step) {
    if (step < steps) {
      const uint32_t stage = shared + static_cast<uint32_t>(step % kStages * kStageBytes);
      copy_operand(stage, a, row0, m, step * kStep, k);
      copy_operand(stage + kOperandBytes, b, column0, n, step * kStep, k);
    }
    copy_async_commit();
  };
  for (int step = 0; step < kStages - 1; ++step) copy_step(step);

  float accumulators[kWarpTile / 16][kWarpTile / 8][4] = {};
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<kStages - 2>();
    // This step's tiles are visible to all threads, and the stage to be filled next is free.
    __syncthreads();
    copy_step(step + kStages - 1);
    const uint32_t a_tile = shared + static_cast<uint32_t>(step % kStages * kStageBytes);
    const uint32_t b_tile = a_tile + kOperandBytes;
#pragma unroll
    for (int kk = 0; kk < kStep / 16; ++kk) {
      uint32_t left[kWarpTile / 16][4], right[kWarpTile / 16][4];
#pragma unroll
      for (int i = 0; i < kWarpTile / 16; ++i) {
        load_matrices(left[i],
                      a_tile + chunk_offset(warp_row + 16 * i + lane % 16, 2 * kk + lane / 16));
        load_matrices(right[i],
                      b_tile + chunk_offset(warp_column + 16 * i + lane / 16 * 8 + lane % 8,
                                            2 * kk + lane / 8 % 2));
      }
#pragma unroll
      for (int i = 0; i < kWarpTile / 16; ++i)
#pragma unroll
        for (int j = 0; j < kWarpTile / 8; ++j)
          mma_bf16(accumulators[i][j], left[i], right[j / 2][j % 2 * 2],
                   right[j / 2][j % 2 * 2 + 1]);
    }
  }
  const int group = lane / 4, quad = lane % 4;
#pragma unroll
  for (int i = 0; i < kWarpTile / 16; ++i)
#pragma unroll
    for (int j = 0; j < kWarpTile / 8; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row0 + warp_row + 16 * i + 8 * half + group;
        const int column = column0 + warp_column + 8 * j + 2 * quad;
        if (row < m && column < n)
          *reinterpret_cast<uint32_t*>(c + int64_t{row} * n + column) =
              pack_bf16(accumulators[i][j][2 * half], accumulators[i][j][2 * half + 1]);
      }
}

}  // namespace

void matmul_mma(const Gemm& p) {
  p.check();
  launch(
      "matmul_mma", mma_kernel,
      {dim3(blocks_for(p.n(), kTile), blocks_for(p.m(), kTile)), kThreads, kStages * kStageBytes},
      p.c.device(), pointer<Element>(p.a), pointer<Element>(p.b), pointer<Element>(p.c), p.m(),
      p.n(), p.k());
}

}  // namespace cohort::bench::ladder
