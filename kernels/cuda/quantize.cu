// Quantisation on CUDA. A half-warp has 128 columns of a row, eight per lane. Elements are read
// once (rows of i8 beyond 128 columns again from the cache), and the loads of all rows of a thread
// are in flight together.
#include "kernels/cuda/device.cuh"
#include "kernels/quantize.h"

namespace cohort::kernels::cuda {
namespace {

// A block of threads has a tile of 128 x 128 elements, a thread 4 x 8.
constexpr int kThreads = 512, kLanes = 16, kGroups = kThreads / kLanes, kRows = 4, kColumns = 8;

// A row-major matrix. `is_wide`: eight elements are one aligned access.
template <class T>
struct Matrix {
  T* p;
  int64_t rows, cols;
  bool is_wide =
      reinterpret_cast<uintptr_t>(p) % (kColumns * sizeof(T)) == 0 && cols % kColumns == 0;
  unsigned across = static_cast<unsigned>(ceil_div(cols, kScaleBlock));  // tiles

  // Elements of a row from column c on, at most eight; 0 outside of the matrix.
  __device__ int live(int64_t row, int64_t c) const {
    return row < rows && c < cols ? static_cast<int>(min(cols - c, int64_t{kColumns})) : 0;
  }
  __device__ __forceinline__ auto load(int64_t row, int64_t c) const {
    const int n = live(row, c);
    if (is_wide && n > 0) return load_pack<kColumns>(p + row * cols + c);
    Pack<std::remove_const_t<T>, kColumns> out{};
#pragma unroll
    for (int k = 0; k < kColumns; ++k)
      if (k < n) out.v[k] = p[row * cols + c + k];
    return out;
  }
  __device__ __forceinline__ void store(int64_t row, int64_t c, const Pack<T, kColumns>& x) const {
    const int n = live(row, c);
    if (is_wide && n > 0) return store_pack(p + row * cols + c, x);
#pragma unroll
    for (int k = 0; k < kColumns; ++k)
      if (k < n) p[row * cols + c + k] = x.v[k];
  }
};

// fn of each element.
template <class To, class From, class F>
__device__ __forceinline__ Pack<To, kColumns> map(const Pack<From, kColumns>& x, F&& fn) {
  Pack<To, kColumns> out;
#pragma unroll
  for (int n = 0; n < kColumns; ++n) out.v[n] = fn(x.v[n]);
  return out;
}
template <class T>
__device__ __forceinline__ uint32_t larger(uint32_t amax, const Pack<T, kColumns>& x) {
#pragma unroll
  for (int n = 0; n < kColumns; ++n) amax = max(amax, magnitude_bits(to_float(x.v[n])));
  return amax;
}

// With kTransposed, `values` and `at` are those of x's transpose. Without kBlocks, rows beyond x's
// last are zeros, whose scale is 1.
template <class T, bool kBlocks, bool kTransposed>
__global__ void __launch_bounds__(kThreads, 2)
    quantize_e4m3(const Matrix<e4m3> values, float* scales, const Matrix<const T> x,
                  const ScaleIndex at) {
  const int group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int64_t top = blockIdx.x / x.across * kScaleBlock,
                left = blockIdx.x % x.across * kScaleBlock, c = left + kColumns * lane;
  const auto row = [&](int i) { return top + (kBlocks ? kRows * group + i : kGroups * i + group); };
  Pack<bf16, kColumns> in[kRows];
  Pack<e4m3, kColumns> out[kRows];
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kRows; ++i)
    in[i] = map<bf16>(x.load(row(i), c), [](T value) { return from_float<bf16>(to_float(value)); });
  if constexpr (kBlocks) {
    __shared__ uint32_t scratch[kThreads / 32];
#pragma unroll
    for (int i = 0; i < kRows; ++i) amax = larger(amax, in[i]);
    amax = block_reduce<kThreads>(amax, scratch, Larger{});
    if (threadIdx.x == 0)
      scales[kTransposed ? at(left, top) : at(top, left)] = GroupScale<e4m3>(amax).scale;
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (!kBlocks) amax = lane_reduce<kLanes>(larger(0, in[i]), Larger{});
    const GroupScale<e4m3> scale(amax);
    if (!kBlocks && lane == 0 && row(i) < round_up(x.rows, 4)) scales[at(row(i), c)] = scale.scale;
    out[i] = map<e4m3>(in[i], [&](bf16 value) { return scale(to_float(value)); });
    if (!kTransposed) values.store(row(i), c, out[i]);
  }
  if constexpr (kTransposed) {
    // A row of the transpose is 16 pairs of words of four bytes, in an order by which neither the
    // writes nor the reads have bank conflicts.
    alignas(8) __shared__ uint32_t turned[kScaleBlock * kLanes * 2];
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      uint32_t word = 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i) word |= uint32_t{out[i].v[n].bits} << 8 * i;
      turned[((kColumns * lane + n) * kLanes + (group / 2 ^ lane)) * 2 + group % 2] = word;
    }
    __syncthreads();
    for (int r = group; r < kScaleBlock; r += kGroups) {
      const auto* pair = &turned[(r * kLanes + (lane ^ r / kColumns)) * 2];
      values.store(left + r, top + kColumns * lane,
                   *reinterpret_cast<const Pack<e4m3, kColumns>*>(pair));
    }
  }
}

// A row per half-warp.
template <class T>
__global__ void __launch_bounds__(kThreads)
    quantize_i8(const Matrix<int8_t> values, float* scales, const Matrix<const T> x) {
  const int64_t row = int64_t{kGroups} * blockIdx.x + threadIdx.x / kLanes;
  const int first = kColumns * (threadIdx.x % kLanes);
  uint32_t amax = 0;
  for (int64_t c = first; c < x.cols; c += kScaleBlock) amax = larger(amax, x.load(row, c));
  const GroupScale<int8_t> scale(lane_reduce<kLanes>(amax, Larger{}));
  if (first == 0 && row < x.rows) scales[row] = scale.scale;
  for (int64_t c = first; c < x.cols; c += kScaleBlock)
    values.store(row, c,
                 map<int8_t>(x.load(row, c), [&](T value) { return scale(to_float(value)); }));
}

template <class T, class Q>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(const Matrix<T> y, const Matrix<const Q> values, const float* scales,
                      const ScaleIndex at) {
  const int64_t top = blockIdx.x / y.across * kScaleBlock + threadIdx.x / kLanes,
                c = blockIdx.x % y.across * kScaleBlock + kColumns * (threadIdx.x % kLanes);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = top + kGroups * i;
    const float scale = y.live(row, c) > 0 ? scales[at(row, c)] : 1.0f;
    y.store(row, c, map<T>(values.load(row, c), [&](Q value) {
              return from_float<T>(dequantized(value, scale));
            }));
  }
}

template <class T, class Source>
Matrix<T> matrix(Source& t) {
  return {static_cast<T*>(t.raw()), t.dim(0), t.dim(1)};
}
template <class T>
LaunchShape tiles(const Matrix<T>& m) {
  return {{blocks_for(ceil_div(m.rows, kScaleBlock) * m.across, 1)}, {kThreads}};
}

}  // namespace

void quantize(const Quantize& args) {
  Quantized& q = args.out;
  const bool is_transposed = !args.x.is_contiguous();
  const Tensor source = is_transposed ? args.x.transpose(0, 1) : args.x;
  float* const scales = q.scales.data<float>();
  dispatch_device(source.dtype(), "quantize", [&]<class T>() {
    const auto x = matrix<const T>(source);
    if (q.values.dtype() == DType::kI8)
      return launch("quantize", quantize_i8<T>, {blocks_for(x.rows, kGroups), kThreads},
                    source.device(), matrix<int8_t>(q.values), scales, x);
    const auto kernel = is_transposed                      ? quantize_e4m3<T, true, true>
                        : q.groups == ScaleGroups::kBlocks ? quantize_e4m3<T, true, false>
                                                           : quantize_e4m3<T, false, false>;
    launch("quantize", kernel, tiles(x), source.device(), matrix<e4m3>(q.values), scales, x,
           ScaleIndex(q));
  });
}

void dequantize(const Dequantize& args) {
  const Quantized& q = args.x;
  dispatch_device(args.y.dtype(), "dequantize", [&]<class T>() {
    dispatch_values(q, [&]<class Q>() {
      const auto y = matrix<T>(args.y);
      launch("dequantize", dequantize_kernel<T, Q>, tiles(y), args.y.device(), y,
             matrix<const Q>(q.values), q.scales.data<float>(), ScaleIndex(q));
    });
  });
}

}  // namespace cohort::kernels::cuda
