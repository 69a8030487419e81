// Sums over ranks on CUDA: a thread adds four elements over all parts.
#include "kernels/cuda/device.cuh"
#include "kernels/pairwise_sum.h"
#include "kernels/sum_parts.h"

namespace cohort::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <int N>
struct Lanes {
  Pack<float, N> pack;
  friend __device__ __forceinline__ Lanes operator+(const Lanes& a, const Lanes& b) {
    Lanes out;
#pragma unroll
    for (int k = 0; k < N; ++k) out.pack.v[k] = a.pack.v[k] + b.pack.v[k];
    return out;
  }
};

// Elements [i, i + N) of the n.
template <int N>
__device__ __forceinline__ void sum_elements(float* y, const float* parts, int ranks, int64_t n,
                                             int64_t i, bool accumulates) {
  PairwiseSum<Lanes<N>> sum;
  for (int r = 0; r < ranks; ++r) sum.add({load_pack<N>(parts + r * n + i)});
  Lanes<N> total = sum.total();
  if (accumulates) total = Lanes<N>{load_pack<N>(y + i)} + total;
  store_pack(y + i, total.pack);
}

__global__ void __launch_bounds__(kThreads)
    sum_parts_kernel(float* y, const float* parts, int ranks, int64_t n, bool accumulates) {
  wait_on_dependent_grids();
  const int64_t i = 4 * (int64_t{blockIdx.x} * kThreads + threadIdx.x);
  const bool aligned =
      (reinterpret_cast<uintptr_t>(y) | reinterpret_cast<uintptr_t>(parts) | 4 * n) % 16 == 0;
  if (aligned && i + 4 <= n) return sum_elements<4>(y, parts, ranks, n, i, accumulates);
  for (int64_t k = i; k < min(n, i + 4); ++k) sum_elements<1>(y, parts, ranks, n, k, accumulates);
}

}  // namespace

void sum_parts(const SumParts& args) {
  const int64_t n = args.y.tensor.numel();
  if (n == 0) return;
  launch("sum_parts", sum_parts_kernel, {blocks_for(n, 4 * kThreads), kThreads},
         args.y.tensor.device(), pointer<float>(args.y.tensor), pointer<float>(args.parts),
         static_cast<int>(args.parts.dim(0)), n, args.y.mode == Grad::kAccumulate);
}

}  // namespace cohort::kernels::cuda
