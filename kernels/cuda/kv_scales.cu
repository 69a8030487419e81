// Scales of keys and values: a block has a head, a warp a row of its weights at a time.
#include "kernels/cuda/device.cuh"
#include "kernels/kv_scales.h"

namespace cohort::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

template <class T>
struct Problem {
  float* scales;
  const T *w, *bias, *norm, *norm_bias, *k_norm, *sb, *a;
  int64_t w_stride, sb_stride;
  int heads, dim, columns, adapter_columns;
  float norm_offset, key_gain;

  __device__ float gain(int c) const { return to_float(norm[c]) + norm_offset; }
};

// Sum of term(i) for i in [0, n) over `threads` threads, of which this one is `thread`.
template <class Term>
__device__ __forceinline__ float strided_sum(int n, int thread, int threads, const Term& term) {
  float sum = 0;
  for (int i = thread; i < n; i += threads) sum += term(i);
  return sum;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
  return x;
}
struct Largest {
  __device__ uint32_t operator()(uint32_t a, uint32_t b) const { return max(a, b); }
};

template <class T>
__global__ void __launch_bounds__(kThreads) kv_scales_kernel(const Problem<T> p) {
  extern __shared__ __align__(16) char memory[];
  __shared__ float sums[kWarps];
  __shared__ uint32_t bounds[kWarps];
  auto* const rows = reinterpret_cast<KvRow*>(memory);  // [D]
  launch_dependents_and_wait();
  const int head = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const bool is_key = head < p.heads / 2, is_normed = is_key && p.k_norm != nullptr;
  float adapter = 0;
  if (p.a != nullptr && !is_normed) {
    adapter = strided_sum(p.adapter_columns * p.columns, thread, kThreads, [&](int i) {
      const int c = i % p.columns;
      const float bias = p.norm_bias == nullptr ? 0.0f : fabsf(to_float(p.norm_bias[c]));
      const float x = to_float(p.a[i]) * (fabsf(p.gain(c)) + bias);
      return x * x;
    });
    adapter = sqrtf(block_reduce<kThreads>(adapter, sums, Plus{}));
  }
  for (int d = thread / 32; d < p.dim && !is_normed; d += kWarps) {
    const int lane = thread % 32, row = head * p.dim + d;
    const T* const w = p.w + row * p.w_stride;
    float weights = sqrtf(warp_sum(strided_sum(p.columns, lane, 32, [&](int c) {
      const float x = to_float(w[c]) * p.gain(c);
      return x * x;
    })));
    float constants = p.bias == nullptr ? 0.0f : fabsf(to_float(p.bias[row]));
    if (p.norm_bias != nullptr)
      constants += fabsf(warp_sum(strided_sum(
          p.columns, lane, 32, [&](int c) { return to_float(w[c]) * to_float(p.norm_bias[c]); })));
    if (p.sb != nullptr)
      weights += adapter * sqrtf(warp_sum(strided_sum(p.adapter_columns, lane, 32, [&](int i) {
                   const float x = to_float(p.sb[row * p.sb_stride + i]);
                   return x * x;
                 })));
    if (lane == 0) rows[d] = {weights, constants};
  }
  __syncthreads();
  uint32_t bound = 0;
  for (int d = thread; d < p.dim; d += kThreads) {
    const float of_row =
        is_normed ? normed_key_bound(to_float(p.k_norm[d]), p.dim, p.key_gain)
        : is_key  ? kv_bound(rows[d], rows[(d + p.dim / 2) % p.dim], p.columns) * p.key_gain
                  : kv_bound(rows[d], {}, p.columns);
    bound = max(bound, magnitude_bits(of_row));
  }
  bound = block_reduce<kThreads>(bound, bounds, Largest{});
  if (thread == 0) p.scales[head] = kv_scale(bound);
}

}  // namespace

void kv_scales(const KvScales& args) {
  const int64_t heads = args.scales.numel(), dim = args.w.rows() / heads;
  COHORT_CHECK(args.a.numel() < (1 << 30) && args.w.dim(1) < (1 << 30),
               "[kv_scales] too large: ", args.w.str());
  dispatch_device(args.w.dtype(), "kv_scales", [&]<class T>() {
    launch("kv_scales", kv_scales_kernel<T>,
           {.grid = blocks_for(heads, 1),
            .block = kThreads,
            .shared_bytes = static_cast<size_t>(dim) * sizeof(KvRow),
            .start = Start::kProgrammatic},
           args.w.device(),
           Problem<T>{.scales = pointer<float>(args.scales),
                      .w = pointer<T>(args.w),
                      .bias = pointer<T>(args.bias),
                      .norm = pointer<T>(args.norm),
                      .norm_bias = pointer<T>(args.norm_bias),
                      .k_norm = pointer<T>(args.k_norm),
                      .sb = pointer<T>(args.sb),
                      .a = pointer<T>(args.a),
                      .w_stride = RowOffsets(args.w).outer,
                      .sb_stride = RowOffsets(args.sb).outer,
                      .heads = static_cast<int>(heads),
                      .dim = static_cast<int>(dim),
                      .columns = static_cast<int>(args.w.dim(1)),
                      .adapter_columns = args.sb.defined() ? static_cast<int>(args.sb.dim(1)) : 0,
                      .norm_offset = static_cast<float>(args.norm_offset),
                      .key_gain = static_cast<float>(args.key_gain)});
  });
}

}  // namespace cohort::kernels::cuda
