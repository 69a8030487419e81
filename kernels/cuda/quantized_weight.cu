// Dequantisation of weights: a thread computes eight columns of a row.
#include "kernels/cuda/device.cuh"
#include "kernels/quantized_weight.h"

namespace cohort::kernels::cuda {
namespace {

constexpr int kThreads = 256, kColumns = 8;

struct Rows {
  const uint8_t* values;
  const float* scales;
  int64_t rows, columns, bytes, groups, y_stride;
  int group;
  bool packed;  // 8 columns of values and of y are one access
};

template <class T, bool kIsNf4>
__global__ void __launch_bounds__(kThreads) dequantize_weight_kernel(T* y, const Rows w) {
  __shared__ float table[16];
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < 16; ++i) table[i] = nf4_value(i);
  }
  __syncthreads();
  const int64_t across = (w.columns + kColumns - 1) / kColumns,
                index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= w.rows * across) return;
  const int64_t row = index / across, first = index % across * kColumns;
  const float scale = w.scales[row * w.groups + first / w.group];
  const uint8_t* const values = w.values + row * w.bytes;
  constexpr int kBytes = kIsNf4 ? kColumns / 2 : kColumns;
  Pack<uint8_t, kBytes> bytes{};
  const int64_t first_byte = kIsNf4 ? first / 2 : first;
  if (w.packed) {
    bytes = load_pack<kBytes>(values + first_byte);
  } else {
    for (int i = 0; i < kBytes && first_byte + i < w.bytes; ++i)
      bytes.v[i] = values[first_byte + i];
  }
  Pack<T, kColumns> out;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const float value = kIsNf4 ? table[bytes.v[i / 2] >> (i % 2 == 0 ? 4 : 0) & 15]
                               : static_cast<float>(static_cast<int8_t>(bytes.v[i]));
    out.v[i] = from_float<T>(weight_value(value, scale));
  }
  T* const to = y + row * w.y_stride + first;
  if (w.packed) {
    constexpr int kAccess = kPackSize<T> < kColumns ? kPackSize<T> : kColumns;
#pragma unroll
    for (int i = 0; i < kColumns; i += kAccess)
      store_pack(to + i, *reinterpret_cast<const Pack<T, kAccess>*>(&out.v[i]));
  } else {
    for (int i = 0; i < kColumns && first + i < w.columns; ++i) to[i] = out.v[i];
  }
}

}  // namespace

void dequantize_weight(const DequantizeWeight& args) {
  const QuantizedWeight& q = args.w;
  dispatch_device(args.y.dtype(), "dequantize_weight", [&]<class T>() {
    T* const y = pointer<T>(args.y);
    Rows w{.values = static_cast<const uint8_t*>(q.values.raw()),
           .scales = q.scales.data<float>(),
           .rows = args.y.dim(0),
           .columns = q.columns,
           .bytes = q.values.dim(1),
           .groups = q.scales.dim(1),
           .y_stride = args.y.strides()[0],
           .group = static_cast<int>(q.group())};
    w.packed = w.columns % kColumns == 0 && w.y_stride % kPackSize<T> == 0 && aligned(y, w.values);
    const auto kernel =
        q.is_nf4() ? dequantize_weight_kernel<T, true> : dequantize_weight_kernel<T, false>;
    const int64_t threads = w.rows * ceil_div(w.columns, kColumns);
    launch("dequantize_weight", kernel, {blocks_for(threads, kThreads), kThreads}, args.y.device(),
           y, w);
  });
}

}  // namespace cohort::kernels::cuda
