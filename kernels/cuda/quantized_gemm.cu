// GEMM of few rows with weights in 8 or 4 bits, limited by reading them: sm_80 and newer, on sm_90
// for tails that sm90/quantized_gemm.cu does not take.
//
// It has the accumulation order of accumulation_order.h: each output is one chain of mma.m16n8k16
// with ascending k, over the columns of the weight and then over those of its adapter. A warp has
// eight or sixteen rows of the weight, and all rows of x. Stages of 128 columns of x and of the
// weight's bytes are copied ahead; a lane expands the numbers of its operand registers itself.
// Columns past the last one are zeros of x, which change no sum.
#include "kernels/cuda/accumulation_order.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/sm90/skinny_gemm.h"
#include "kernels/quantized_weight.h"

namespace cohort::kernels::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32, kColumns = 128, kRowBytesX = 2 * kColumns;
constexpr int64_t kMostRows = 64;

__constant__ float kTable[16] = {nf4_value(0),  nf4_value(1),  nf4_value(2),  nf4_value(3),
                                 nf4_value(4),  nf4_value(5),  nf4_value(6),  nf4_value(7),
                                 nf4_value(8),  nf4_value(9),  nf4_value(10), nf4_value(11),
                                 nf4_value(12), nf4_value(13), nf4_value(14), nf4_value(15)};

struct Operands {
  bf16* y;
  const bf16 *x, *adapter, *bias;  // the last two may be null
  const uint8_t* values;
  const float* scales;
  int m, n, k, tail;
  int64_t x_stride, y_stride;
};

// kTiles: tiles of eight rows of the weight for each warp.
template <bool kIsNf4_, int kTokens_, int kTiles_, int kStages_>
struct Tiling {
  static constexpr bool kIsNf4 = kIsNf4_;
  static constexpr int kTokens = kTokens_, kTiles = kTiles_, kStages = kStages_;
  static constexpr int kRows = 8 * kTiles * kWarps;
  static constexpr int kGroup = kIsNf4 ? 64 : 128, kGroups = kColumns / kGroup;
  static constexpr int kBytes = kIsNf4 ? kColumns / 2 : kColumns;  // in a row of the weight
  static constexpr int kStride = kBytes + 16;  // without bank conflicts between eight rows
  static constexpr int kBytesX = kTokens * kRowBytesX, kBytesW = kRows * kStride;
  static constexpr int kStageBytes = kBytesX + kBytesW + kRows * kGroups * 4;
  static constexpr int kShared = kStages * kStageBytes;
  static_assert(kShared <= 99 << 10 && kStageBytes % 128 == 0);
  static_assert(kTokens * kColumns / 8 % kThreads == 0 && kRows * kBytes / 16 % kThreads == 0 &&
                kRows * kGroups <= kThreads);
};

// Address of 16 bytes of a row of x in a stage: ldmatrix then has no bank conflicts.
__device__ __forceinline__ uint32_t chunk_of(uint32_t x, int row, int chunk) {
  return x + row * kRowBytesX + (chunk ^ row % 8) * 16;
}

// Copies columns [128 step, 128 step + 128) of the operands to a stage. The numbers of copies of 16
// bytes are multiples of the number of threads; the scales are at most as many.
template <class T>
__device__ __forceinline__ void load_stage(const Operands& in, uint32_t stage, int first_row,
                                           int step) {
  const int column = step * kColumns, thread = threadIdx.x;
#pragma unroll
  for (int i = 0; i < T::kTokens * kColumns / 8 / kThreads; ++i) {
    const int row = (thread + i * kThreads) / (kColumns / 8), chunk = thread % (kColumns / 8);
    const bool live = row < in.m && column + 8 * chunk < in.k;
    copy_async(chunk_of(stage, row, chunk),
               in.x + (live ? row * in.x_stride + column + 8 * chunk : 0), live ? 16 : 0);
  }
  const int64_t row_bytes = T::kIsNf4 ? in.k / 2 : in.k;
#pragma unroll
  for (int i = 0; i < T::kRows * T::kBytes / 16 / kThreads; ++i) {
    const int at = thread + i * kThreads, row = at / (T::kBytes / 16),
              byte = at % (T::kBytes / 16) * 16;
    const int64_t from = int64_t{step} * T::kBytes + byte;
    const bool live = first_row + row < in.n && from < row_bytes;
    copy_async(stage + T::kBytesX + row * T::kStride + byte,
               in.values + (live ? (first_row + row) * row_bytes + from : 0), live ? 16 : 0);
  }
  if (thread < T::kRows * T::kGroups) {
    const int row = thread / T::kGroups, groups = (in.k + T::kGroup - 1) / T::kGroup,
              at = step * T::kGroups + thread % T::kGroups;
    const bool live = first_row + row < in.n && at < groups;
    copy_async_small<4>(stage + T::kBytesX + T::kBytesW + 4 * thread,
                        in.scales + (live ? int64_t{first_row + row} * groups + at : 0),
                        live ? 4 : 0);
  }
}

// The numbers of eight columns of nf4, a byte for each lane of a quad, as the lane's two values.
__device__ __forceinline__ uint32_t expand_nf4(uint32_t word, int quad, float entry, float scale) {
  const uint32_t byte = word >> 8 * quad;
  const float first = __shfl_sync(0xffffffffu, entry, byte >> 4 & 15),
              second = __shfl_sync(0xffffffffu, entry, byte & 15);
  return pack_bf16(first * scale, second * scale);
}
// An integer of 8 bits as a float, exactly: with its offset of 128 the low bits of 2^23 + i.
__device__ __forceinline__ float int8_value(uint32_t bytes, int index) {
  const uint32_t bits = __byte_perm(bytes ^ 0x80808080u, 0x4b000000u, 0x7550 + index);
  return __uint_as_float(bits) - 8388736.0f;
}
// Likewise of eight columns of int8, which are two words.
__device__ __forceinline__ uint32_t expand_int8(uint32_t low, uint32_t high, int quad,
                                                float scale) {
  const uint32_t pair = (quad < 2 ? low : high) >> 16 * (quad % 2);
  return pack_bf16(int8_value(pair, 0) * scale, int8_value(pair, 1) * scale);
}

template <class T>
using Sums = float[T::kTokens / 16][T::kTiles][4];

// Adds the products of a stage; `row`: the lane's first row of the weight in the block.
template <class T>
__device__ __forceinline__ void multiply_stage(Sums<T>& sums, const uint8_t* stage, int row,
                                               int lane, float entry) {
  const int quad = lane % 4;
  const uint32_t x = shared_address(stage);
#pragma unroll
  for (int part = 0; part < kColumns / 32; ++part) {  // two steps of 16 columns
    uint32_t b[T::kTiles][4];
#pragma unroll
    for (int tile = 0; tile < T::kTiles; ++tile) {
      const int at = row + 8 * tile;
      const uint8_t* const w = stage + T::kBytesX + at * T::kStride;
      const float scale = reinterpret_cast<const float*>(
          stage + T::kBytesX + T::kBytesW)[at * T::kGroups + part * 32 / T::kGroup];
      if constexpr (T::kIsNf4) {
        const uint4 words = *reinterpret_cast<const uint4*>(w + 16 * part);
        const uint32_t all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) b[tile][i] = expand_nf4(all[i], quad, entry, scale);
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4 words = *reinterpret_cast<const uint4*>(w + 32 * part + 16 * i);
          b[tile][2 * i] = expand_int8(words.x, words.y, quad, scale);
          b[tile][2 * i + 1] = expand_int8(words.z, words.w, quad, scale);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int t = 0; t < T::kTokens / 16; ++t) {
        uint32_t a[4];
        load_matrices(a, chunk_of(x, 16 * t + lane % 16, 4 * part + 2 * i + lane / 16));
#pragma unroll
        for (int tile = 0; tile < T::kTiles; ++tile)
          mma_bf16(sums[t][tile], a, b[tile][2 * i], b[tile][2 * i + 1]);
      }
  }
}

// Adds the columns of the adapter; `row`: the lane's first row of the weight.
template <class T>
__device__ __forceinline__ void add_tail(const Operands& in, Sums<T>& sums, int row, int lane) {
  const int group = lane / 4, quad = lane % 4;
  const auto pair = [](const bf16* p) { return *reinterpret_cast<const uint32_t*>(p); };
  for (int c = 2 * quad; c < in.tail; c += 16) {
    uint32_t b[T::kTiles][2];
#pragma unroll
    for (int tile = 0; tile < T::kTiles; ++tile) {
      const bf16* const from = in.adapter + int64_t{min(row + 8 * tile, in.n - 1)} * in.tail + c;
      b[tile][0] = pair(from);
      b[tile][1] = pair(from + 8);
    }
#pragma unroll
    for (int t = 0; t < T::kTokens / 16; ++t) {
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 16 * t + group + 8 * (i % 2);
        a[i] = token < in.m ? pair(in.x + token * in.x_stride + in.k + c + 8 * (i / 2)) : 0;
      }
#pragma unroll
      for (int tile = 0; tile < T::kTiles; ++tile)
        mma_bf16(sums[t][tile], a, b[tile][0], b[tile][1]);
    }
  }
}

// Adds the bias and writes columns `column` and `column` + 1 of y, and those of further tiles.
template <class T>
__device__ __forceinline__ void store(const Operands& in, const Sums<T>& sums, int column,
                                      int group) {
#pragma unroll
  for (int tile = 0; tile < T::kTiles; ++tile) {
    const int at = column + 8 * tile;
    if (at >= in.n) return;
#pragma unroll
    for (int i = 0; i < T::kTokens / 8; ++i) {
      const int token = group + 8 * i;
      if (token >= in.m) continue;
      float first = sums[i / 2][tile][2 * (i % 2)], second = sums[i / 2][tile][2 * (i % 2) + 1];
      if (in.bias != nullptr) {
        first += to_float(in.bias[at]);
        second += to_float(in.bias[at + 1]);
      }
      *reinterpret_cast<uint32_t*>(in.y + token * in.y_stride + at) = pack_bf16(first, second);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) quantized_gemm_kernel(const Operands in) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4;
  const int first_row = blockIdx.x * T::kRows, steps = (in.k + kColumns - 1) / kColumns,
            row = 8 * T::kTiles * warp;
  const auto load = [&, base = shared_address(shared)](int step) {
    if (step < steps) load_stage<T>(in, base + step % T::kStages * T::kStageBytes, first_row, step);
    copy_async_commit();
  };
  const float entry = kTable[lane % 16];
  Sums<T> sums = {};
  for (int step = 0; step < T::kStages - 1; ++step) load(step);
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<T::kStages - 2>();
    __syncthreads();
    load(step + T::kStages - 1);
    multiply_stage<T>(sums, shared + step % T::kStages * T::kStageBytes, row + group, lane, entry);
  }
  if (in.adapter != nullptr) add_tail<T>(in, sums, first_row + row + group, lane);
  store<T>(in, sums, first_row + row + 2 * (lane % 4), group);
}

template <bool kIsNf4>
void run(const Operands& in, Device device) {
  const auto start = [&]<int kTokens, int kTiles, int kStages>() {
    using T = Tiling<kIsNf4, kTokens, kTiles, kStages>;
    launch("quantized_gemm", quantized_gemm_kernel<T>,
           {blocks_for(in.n, T::kRows), kThreads, T::kShared}, device, in);
  };
  if (in.m <= 16) return start.template operator()<16, 1, 10>();
  if (in.m <= 32) return start.template operator()<32, 1, 7>();
  start.template operator()<64, 2, kIsNf4 ? 4 : 3>();
}

}  // namespace

bool reads_quantized(int64_t rows, const QuantizedWeight& w, int64_t tail, bool with_bias) {
  const int64_t n = w.values.dim(0);
  const auto sized = [&](const Shape& shape) {
    return Tensor::without_elements(shape, DType::kBF16, w.values.device());
  };
  return rows > 0 && rows <= kMostRows && w.columns % 64 == 0 && n % 8 == 0 && tail % 16 == 0 &&
         n > 0 && w.columns > 0 && std::max(n, w.columns) < int64_t{1} << 30 &&
         linear_accumulates_in_order(sized({rows, w.columns + tail}), sized({n, w.columns + tail}),
                                     with_bias ? sized({n}) : Tensor());
}

void quantized_linear(const QuantizedLinear& args) {
  const auto& [y, x, w, adapter, bias] = args;
  const Operands in{.y = pointer<bf16>(y),
                    .x = pointer<bf16>(x),
                    .adapter = pointer<bf16>(adapter),
                    .bias = pointer<bf16>(bias),
                    .values = static_cast<const uint8_t*>(w.values.raw()),
                    .scales = w.scales.data<float>(),
                    .m = static_cast<int>(x.rows()),
                    .n = static_cast<int>(w.values.dim(0)),
                    .k = static_cast<int>(w.columns),
                    .tail = adapter.defined() ? static_cast<int>(adapter.dim(1)) : 0,
                    .x_stride = RowOffsets(x).outer,
                    .y_stride = RowOffsets(y).outer};
  const auto is_aligned = [](const void* p, uintptr_t bytes) {
    return reinterpret_cast<uintptr_t>(p) % bytes == 0;
  };
  COHORT_CHECK(
      RowOffsets(x).inner == 1 && RowOffsets(y).inner == 1 &&
          aligned(in.x, in.values, in.adapter) && is_aligned(in.y, 4) && in.x_stride % 8 == 0 &&
          in.y_stride % 2 == 0,
      "[quantized_linear] expected rows of x aligned to 16 bytes and those of y to 4, got ",
      x.str(), " and ", y.str());
  check_tail(x, in.tail);
  if (is_quantized_skinny(x.device(), in.m, w, in.tail)) return quantized_skinny_gemm(args);
  if (w.is_nf4())
    run<true>(in, x.device());
  else
    run<false>(in, x.device());
}

}  // namespace cohort::kernels::cuda
