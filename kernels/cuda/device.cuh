// Common to CUDA kernels: element types, 16-byte accesses, block reductions in a fixed order.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "core/launch.cuh"
#include "kernels/common.h"

namespace cohort::kernels::cuda {

using bf16 = __nv_bfloat16;
using kernels::pointer;

using ::cohort::cuda::blocks_for;
using ::cohort::cuda::launch;
using ::cohort::cuda::launch_dependent_grids;
using ::cohort::cuda::launch_dependents_and_wait;
using ::cohort::cuda::LaunchShape;
using ::cohort::cuda::Start;
using ::cohort::cuda::Trigger;
using ::cohort::cuda::wait_on_dependent_grids;

// Limits a wait of a debug build (COHORT_SPIN_LIMIT): the kernel traps when it has waited for about
// two seconds. Other builds wait without a limit.
class SpinLimit {
 public:
  // Called in each iteration of a wait.
  __device__ __forceinline__ void check() {
#ifdef COHORT_SPIN_LIMIT
    constexpr uint32_t kNanoseconds = 2'000'000'000;
    uint32_t now;
    asm volatile("mov.u32 %0, %%globaltimer_lo;\n" : "=r"(now));
    if (begin_ == 0) begin_ = now;
    if (now - begin_ > kNanoseconds) __trap();
#endif
  }

 private:
  [[maybe_unused]] uint32_t begin_ = 0;
};

// Calls fn.operator()<T>() with the device's element type: float or bf16. Throws Error
// naming `op` for any other dtype.
template <class F>
decltype(auto) dispatch_device(DType dtype, const char* op, F&& fn) {
  COHORT_CHECK(dtype == DType::kF32 || dtype == DType::kBF16, "[", op,
               "] expected f32 or bf16 on a CUDA device, got ", dtype_name(dtype));
  return dtype == DType::kF32 ? fn.template operator()<float>() : fn.template operator()<bf16>();
}

// Conversions between storage and arithmetic. To bf16: round to nearest even.
__device__ __forceinline__ float to_float(float x) {
  return x;
}
__device__ __forceinline__ float to_float(bf16 x) {
  return __bfloat162float(x);
}
template <class T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (sizeof(T) == 2)
    return __float2bfloat16_rn(x);
  else
    return x;
}

// N elements per access (N * sizeof(T) <= 16 and a power of two).
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T v[N];
};
template <class T>
inline constexpr int kPackSize = 16 / sizeof(T);

template <int N, class T>
__device__ __forceinline__ Pack<T, N> load_pack(const T* p) {
  return *reinterpret_cast<const Pack<T, N>*>(p);
}
template <int N, class T>
__device__ __forceinline__ void store_pack(T* p, const Pack<T, N>& value) {
  *reinterpret_cast<Pack<T, N>*>(p) = value;
}

// True if every pointer is null or 16-byte aligned: the condition for 16-byte accesses from row 0.
template <class... P>
bool aligned(const P*... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

struct Plus {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Larger {  // ignores NaN
  template <class T>
  __device__ T operator()(T a, T b) const {
    return max(a, b);
  }
};

// Marks a value as warp-uniform for the compiler, which then keeps it and what depends on it in
// uniform registers.
__device__ __forceinline__ int uniform(int x) {
  return __shfl_sync(0xffffffffu, x, 0);
}

// Coordinates of tile i of `rows` x `columns` tiles in grouped order: down the rows of a group,
// then the next column (Tillet et al. 2019, Triton). Concurrent tiles form a near-square, whose
// operands stay in the L2 cache.
struct TileCoordinates {
  int row, column;
};
__device__ __forceinline__ TileCoordinates grouped_tile(int i, int rows, int columns) {
  constexpr int kGroupRows = 16;
  const int group = i / (kGroupRows * columns), in_group = i % (kGroupRows * columns);
  const int width = min(kGroupRows, rows - group * kGroupRows);
  return {group * kGroupRows + in_group % width, in_group / width};
}

// Reduces one value per lane over kLanes adjacent lanes, a power of two, by a butterfly: every lane
// gets the same bits if `combine` is commutative, because partners differ only in the order of the
// two operands.
template <int kLanes, class T, class Combine>
__device__ __forceinline__ T lane_reduce(T x, Combine combine) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2)
    x = combine(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

// Reduces one value per thread over a block of kThreads threads (a multiple of 32): a butterfly
// over the lanes of a warp, then the warps' values in ascending order; every thread gets the same
// bits. `scratch` holds kThreads / 32 values and may be reused after the next __syncthreads().
template <int kThreads, class T, class Combine>
__device__ __forceinline__ T block_reduce(T x, T* scratch, Combine combine) {
  x = lane_reduce<32>(x, combine);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  // Every thread reads the values of all warps: no second barrier, and the same order for all.
  T total = scratch[0];
#pragma unroll
  for (int w = 1; w < kThreads / 32; ++w) total = combine(total, scratch[w]);
  return total;
}

}  // namespace cohort::kernels::cuda
