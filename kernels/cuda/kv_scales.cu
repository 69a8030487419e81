// Scales of queries, keys and values: a block has a head, a warp a row of its weights at a time.
#include "kernels/cuda/device.cuh"
#include "kernels/kv_scales.h"

namespace cohort::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

template <class T>
struct Problem {
  float* scales;
  const T *w, *bias, *norm, *norm_bias, *q_norm, *k_norm, *sb, *a;
  int64_t w_stride, sb_stride;
  int heads, kv_heads, dim, columns, adapter_columns;
  float norm_offset, rotary_gain;

  // The lane's parts of |x g|_2^2 and of |x b|_1, of n columns, summed over the warp. Undefined g
  // are ones, and b zeros.
  __device__ __forceinline__ KvRow norms(const T* x, int n, const T* g, const T* b) const {
    float squares = 0, shifts = 0;
    for (int c = static_cast<int>(threadIdx.x % 32); c < n; c += 32) {
      const float value = to_float(x[c]);
      const float y = g == nullptr ? value : value * (to_float(g[c]) + norm_offset);
      squares += y * y;
      if (b != nullptr) shifts += fabsf(value * to_float(b[c]));
    }
    return {lane_reduce<32>(squares, Plus{}), lane_reduce<32>(shifts, Plus{})};
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads) kv_scales_kernel(const Problem<T> p) {
  extern __shared__ __align__(16) char memory[];
  __shared__ float sums[2][kWarps];
  __shared__ uint32_t bounds[kWarps];
  auto* const rows = reinterpret_cast<KvRow*>(memory);  // [D]
  launch_dependents_and_wait();
  const int head = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const bool is_rotated = head < p.heads - p.kv_heads;
  const T* const head_norm = head < p.heads - 2 * p.kv_heads ? p.q_norm : p.k_norm;
  const bool is_normed = is_rotated && head_norm != nullptr;
  const int warp = thread / 32, lane = thread % 32;
  float a_weights = 0, a_shifts = 0;  // the adapter's
  if (p.a != nullptr && !is_normed) {
    for (int r = warp; r < p.adapter_columns; r += kWarps) {
      const KvRow row = p.norms(p.a + int64_t{r} * p.columns, p.columns, p.norm, p.norm_bias);
      if (lane > 0) continue;
      a_weights += row.weights;
      a_shifts += row.shifts * row.shifts;
    }
    a_weights = sqrtf(block_reduce<kThreads>(a_weights, sums[0], Plus{}));
    a_shifts = sqrtf(block_reduce<kThreads>(a_shifts, sums[1], Plus{}));
  }
  for (int d = warp; d < p.dim && !is_normed; d += kWarps) {
    const int64_t row = head * p.dim + d;
    KvRow out = p.norms(p.w + row * p.w_stride, p.columns, p.norm, p.norm_bias);
    out.weights = sqrtf(out.weights);
    if (p.sb != nullptr) {
      const float length =
          sqrtf(p.norms(p.sb + row * p.sb_stride, p.adapter_columns, nullptr, nullptr).weights);
      out.weights += length * a_weights;
      out.shifts += length * a_shifts;
    }
    if (p.bias != nullptr) out.bias = fabsf(to_float(p.bias[row]));
    if (lane == 0) rows[d] = out;
  }
  __syncthreads();
  uint32_t bound = 0;
  for (int d = thread; d < p.dim; d += kThreads) {
    const float of_row =
        is_normed    ? normed_bound(to_float(head_norm[d]), p.dim, p.rotary_gain)
        : is_rotated ? kv_bound(rows[d], rows[(d + p.dim / 2) % p.dim], p.columns) * p.rotary_gain
                     : kv_bound(rows[d], {}, p.columns);
    bound = max(bound, magnitude_bits(of_row));
  }
  bound = block_reduce<kThreads>(bound, bounds, Larger{});
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
                      .q_norm = pointer<T>(args.q_norm),
                      .k_norm = pointer<T>(args.k_norm),
                      .sb = pointer<T>(args.sb),
                      .a = pointer<T>(args.a),
                      .w_stride = RowOffsets(args.w).outer,
                      .sb_stride = RowOffsets(args.sb).outer,
                      .heads = static_cast<int>(heads),
                      .kv_heads = static_cast<int>(args.kv_heads),
                      .dim = static_cast<int>(dim),
                      .columns = static_cast<int>(args.w.dim(1)),
                      .adapter_columns = args.sb.defined() ? static_cast<int>(args.sb.dim(1)) : 0,
                      .norm_offset = static_cast<float>(args.norm_offset),
                      .rotary_gain = static_cast<float>(args.rotary_gain)});
  });
}

}  // namespace cohort::kernels::cuda
