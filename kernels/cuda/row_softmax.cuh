// Row softmax statistics behind every log-prob on CUDA: the fused head of training and the sampler
// call it on the same f32 logits and get the same bits. One block reads a row once: each warp has
// one run of consecutive ids, and each of its threads has kChains online-softmax accumulators over
// ids that depend on the vocabulary size only; all sums are added in a fixed order. The sampler
// inverts the CDF by the warps' sums. If training needs the gradients of the same logits, a row is
// instead distributed over the blocks of a cluster (head.cu), where a warp has one chain of a run.
#pragma once

#include <cfloat>
#include <cmath>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/mma.cuh"

namespace cohort::kernels::cuda {

inline constexpr int kRowThreads = 512, kRowWarps = kRowThreads / 32;
// Ids that a warp and a block read at a time, four consecutive ids per thread.
inline constexpr int kWarpTile = 4 * 32, kRowTile = 4 * kRowThreads;
// Chain c of a run has every kChains-th tile of a warp, starting at tile c.
inline constexpr int kChains = 4;

// Number of ids in a warp's run; the last runs may be shorter or empty.
__host__ __device__ inline int64_t run_length(int64_t vocab) {
  return (vocab + kRowTile - 1) / kRowTile * kWarpTile;
}

// With d[v] = (logits[v] - largest) inverse_temperature:
struct RowSoftmax {
  float largest, inverse_temperature;
  double sum, weighted;  // sum of e^d, sum of e^d d

  __device__ double log_sum() const { return log(sum); }
  // Log-sum-exp of the logits at the temperature.
  __device__ float lse() const {
    return static_cast<float>(
        static_cast<double>(largest) * static_cast<double>(inverse_temperature) + log_sum());
  }
  __device__ float entropy() const { return static_cast<float>(log_sum() - weighted / sum); }
  __device__ float scaled(float logit) const { return (logit - largest) * inverse_temperature; }
  __device__ float logprob(float logit) const {
    return static_cast<float>(static_cast<double>(scaled(logit)) - log_sum());
  }
  // NaN or an infinite largest logit gives no distribution.
  __device__ bool valid() const { return isfinite(largest) && isfinite(sum); }
};

// Logits [v, v + 4) of a row; -inf from `end` on.
__device__ __forceinline__ Pack<float, 4> load_logits(const float* logits, int64_t v, int64_t end) {
  // Logits of an unaligned row (no padding, and a vocabulary that is not a multiple of 4) are read
  // one by one.
  if (v + 4 <= end && reinterpret_cast<uintptr_t>(logits) % 16 == 0)
    return load_pack<4>(logits + v);
  Pack<float, 4> out;
#pragma unroll
  for (int k = 0; k < 4; ++k) out.v[k] = v + k < end ? logits[v + k] : -INFINITY;
  return out;
}

// Running sums of one chain over a thread's ids: sum of e = 2^(exponent (z - largest)), weighted
// sum of e (z - largest). exponent: log2(e) inverse_temperature.
struct PartialSoftmax {
  float largest = -INFINITY, sum = 0, weighted = 0;

  // Makes the sums relative to another largest logit. Empty sums stay 0; NaN stays NaN.
  __device__ void rebase(float to, float exponent) {
    if (sum != 0) {
      // If the factor is 0 the shift may be -inf, and 0 times -inf would be NaN.
      const float shift = largest - to, factor = fast_exp2(shift * exponent);
      weighted = factor > 0 ? factor * __fmaf_rn(shift, sum, weighted) : 0;
      sum *= factor;
    }
    largest = to;
  }

  __device__ void add(const Pack<float, 4>& logits, float exponent) {
    float top = logits.v[0];
#pragma unroll
    for (const float z : logits.v) top = fmaxf(top, z);
    // At most one rescaling per pack, since exponentials dominate the cost.
    if (top > largest) rebase(top, exponent);
    // Before the first finite logit any finite base is correct.
    const float from = largest == -INFINITY ? 0 : largest;
#pragma unroll
    for (const float z : logits.v) {
      const float d = z - from, e = fast_exp2(d * exponent);
      sum += e;
      // An excluded token adds 0 rather than 0 times -inf.
      weighted = __fmaf_rn(e, fmaxf(d, -FLT_MAX), weighted);
    }
  }
};

// Called by all kRowThreads threads of a block; all get the result. It may be called again without
// a barrier: between the last read of a scratch array and its next write there is a barrier of
// another reduction. `run_sums`, [kRowWarps] in shared memory, receives the sums of e^d over the
// warps' runs; added in ascending order they are bitwise `sum`.
__device__ inline RowSoftmax row_softmax(const float* logits, int64_t vocab,
                                         float inverse_temperature, double* run_sums) {
  __shared__ float warp_largest[kRowWarps];
  __shared__ double warp_weighted[kRowWarps];
  const int64_t run = run_length(vocab), begin = threadIdx.x / 32 * run;
  const int64_t end = min(vocab, begin + run);
  const float exponent = inverse_temperature * kLog2e;
  PartialSoftmax chains[kChains];
  // With few rows, a lane requests one of the 128-byte lines that its warp reads a few iterations
  // later. With many, this only takes bandwidth from the loads.
  constexpr int kStep = kChains * kWarpTile, kLines = kStep / 32, kAhead = 4;
  constexpr unsigned kFewRows = 64;
  const auto prefetch = [&](int64_t tile) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    if (gridDim.x <= kFewRows && lane < kLines && tile + 32 * lane < end)
      asm volatile("prefetch.global.L2 [%0];\n" ::"l"(logits + tile + 32 * lane));
  };
  for (int step = 1; step < kAhead; ++step) prefetch(begin + step * kStep);
  for (int64_t v = begin + 4 * (threadIdx.x % 32); v < end; v += kStep) {
    prefetch(v - 4 * (threadIdx.x % 32) + kAhead * kStep);
    Pack<float, 4> batch[kChains];
    // All loads before the arithmetic, so that four are in flight.
#pragma unroll
    for (int c = 0; c < kChains; ++c) batch[c] = load_logits(logits, v + c * kWarpTile, end);
#pragma unroll
    for (int c = 0; c < kChains; ++c) chains[c].add(batch[c], exponent);
  }
  float thread_largest = -INFINITY;
#pragma unroll
  for (const PartialSoftmax& chain : chains) thread_largest = fmaxf(thread_largest, chain.largest);
  const float largest = block_reduce<kRowThreads>(thread_largest, warp_largest, Larger{});
  // Rebase all sums to the row's largest logit, then add them in f64.
  double sum = 0, weighted = 0;
#pragma unroll
  for (PartialSoftmax& chain : chains) {
    chain.rebase(largest, exponent);
    sum += static_cast<double>(chain.sum);
    weighted += static_cast<double>(chain.weighted);
  }
  return {.largest = largest,
          .inverse_temperature = inverse_temperature,
          .sum = block_reduce<kRowThreads>(sum, run_sums, Plus{}),
          .weighted = static_cast<double>(inverse_temperature) *
                      block_reduce<kRowThreads>(weighted, warp_weighted, Plus{})};
}

}  // namespace cohort::kernels::cuda
