// GEMM of few rows with weights in 8 or 4 bits, limited by reading them: sm_80 and newer.
//
// It has the accumulation order of accumulation_order.h: each output is one chain of mma.m16n8k16
// with ascending k, over the columns of the weight and then over those of its adapter. A block has
// 32 rows of the weight, eight for each warp, and all rows of x. Stages of 128 columns of x and of
// the weight's bytes are copied ahead; a lane expands the numbers of its operand register itself.
// Columns past the last one are zeros of x, which change no sum.
#include "kernels/cuda/accumulation_order.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/quantized_weight.h"

namespace cohort::kernels::cuda {
namespace {

constexpr int kThreads = 128, kTileRows = 32, kColumns = 128, kRowBytesX = 2 * kColumns;
constexpr int64_t kMostRows = 64;

struct Operands {
  bf16* y;
  const bf16 *x, *adapter, *bias;  // the last two may be null
  const uint8_t* values;
  const float* scales;
  int m, n, k, tail;
  int64_t x_stride, y_stride;
};

template <bool kIsNf4, int kTokens, int kStages_>
struct Tiling {
  static constexpr int kStages = kStages_;
  static constexpr int kGroup = kIsNf4 ? 64 : 128, kGroups = kColumns / kGroup;
  static constexpr int kBytes = kIsNf4 ? kColumns / 2 : kColumns;  // in a row of the weight
  static constexpr int kStride = kBytes + 16;  // without bank conflicts between eight rows
  static constexpr int kBytesX = kTokens * kRowBytesX, kBytesW = kTileRows * kStride;
  static constexpr int kStageBytes = kBytesX + kBytesW + kTileRows * kGroups * 4;
  static constexpr int kShared = kStages * kStageBytes;
  static_assert(kShared <= 99 << 10 && kStageBytes % 128 == 0);
};

// Address of 16 bytes of a row of x in a stage: ldmatrix then has no bank conflicts.
__device__ __forceinline__ uint32_t chunk_of(uint32_t x, int row, int chunk) {
  return x + row * kRowBytesX + (chunk ^ row % 8) * 16;
}

// Copies columns [128 step, 128 step + 128) of the operands to a stage.
template <class T, bool kIsNf4, int kTokens>
__device__ void load_stage(const Operands& in, uint32_t stage, int first_row, int step) {
  const int column = step * kColumns;
  for (int i = threadIdx.x; i < kTokens * kColumns / 8; i += kThreads) {
    const int row = i / (kColumns / 8), chunk = i % (kColumns / 8);
    const bool live = row < in.m && column + 8 * chunk < in.k;
    copy_async(chunk_of(stage, row, chunk),
               in.x + (live ? row * in.x_stride + column + 8 * chunk : 0), live ? 16 : 0);
  }
  const int64_t row_bytes = kIsNf4 ? in.k / 2 : in.k;
  for (int i = threadIdx.x; i < kTileRows * T::kBytes / 16; i += kThreads) {
    const int row = i / (T::kBytes / 16), byte = i % (T::kBytes / 16) * 16;
    const int64_t from = int64_t{step} * T::kBytes + byte;
    const bool live = first_row + row < in.n && from < row_bytes;
    copy_async(stage + T::kBytesX + row * T::kStride + byte,
               in.values + (live ? (first_row + row) * row_bytes + from : 0), live ? 16 : 0);
  }
  if (threadIdx.x < kTileRows * T::kGroups) {
    const int row = threadIdx.x / T::kGroups, group = threadIdx.x % T::kGroups,
              groups = (in.k + T::kGroup - 1) / T::kGroup, at = step * T::kGroups + group;
    const bool live = first_row + row < in.n && at < groups;
    copy_async_small<4>(stage + T::kBytesX + T::kBytesW + 4 * threadIdx.x,
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
// Likewise of eight columns of int8, which are two words.
__device__ __forceinline__ uint32_t expand_int8(uint32_t low, uint32_t high, int quad,
                                                float scale) {
  const uint32_t pair = (quad < 2 ? low : high) >> 16 * (quad % 2);
  return pack_bf16(static_cast<float>(static_cast<int8_t>(pair)) * scale,
                   static_cast<float>(static_cast<int8_t>(pair >> 8)) * scale);
}

// Adds the columns of the adapter.
template <int kTokens>
__device__ void add_tail(const Operands& in, float (&sums)[kTokens / 16][4], int row, int group,
                         int quad) {
  const bf16* const b = in.adapter + int64_t{min(row + group, in.n - 1)} * in.tail + 2 * quad;
  const auto pair = [](const bf16* p) { return *reinterpret_cast<const uint32_t*>(p); };
  for (int c = 0; c < in.tail; c += 16) {
    const uint32_t b0 = pair(b + c), b1 = pair(b + c + 8);
#pragma unroll
    for (int t = 0; t < kTokens / 16; ++t) {
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 16 * t + group + 8 * (i % 2);
        const bf16* const x = in.x + token * in.x_stride + in.k + c + 2 * quad + 8 * (i / 2);
        a[i] = token < in.m ? pair(x) : 0;
      }
      mma_bf16(sums[t], a, b0, b1);
    }
  }
}

template <bool kIsNf4, int kTokens, int kStages>
__global__ void __launch_bounds__(kThreads) quantized_gemm_kernel(const Operands in) {
  using T = Tiling<kIsNf4, kTokens, kStages>;
  extern __shared__ __align__(128) uint8_t shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quad = lane % 4;
  const int first_row = blockIdx.x * kTileRows, steps = (in.k + kColumns - 1) / kColumns;
  const uint32_t base = shared_address(shared);
  const auto load = [&](int step) {
    if (step < steps)
      load_stage<T, kIsNf4, kTokens>(in, base + step % kStages * T::kStageBytes, first_row, step);
    copy_async_commit();
  };
  __shared__ float table[16];
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < 16; ++i) table[i] = nf4_value(i);
  }
  __syncthreads();
  const float entry = table[lane % 16];
  float sums[kTokens / 16][4] = {};
  for (int step = 0; step < kStages - 1; ++step) load(step);
  for (int step = 0; step < steps; ++step) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    load(step + kStages - 1);
    const int offset = step % kStages * T::kStageBytes;
    const uint8_t* const w = shared + offset + T::kBytesX + (8 * warp + group) * T::kStride;
    const float* const scales =
        reinterpret_cast<const float*>(shared + offset + T::kBytesX + T::kBytesW) +
        (8 * warp + group) * T::kGroups;
#pragma unroll
    for (int part = 0; part < kColumns / 32; ++part) {  // two steps of 16 columns
      const float scale = scales[part * 32 / T::kGroup];
      uint32_t b[4];
      if constexpr (kIsNf4) {
        const uint4 words = *reinterpret_cast<const uint4*>(w + 16 * part);
        const uint32_t all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) b[i] = expand_nf4(all[i], quad, entry, scale);
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4 words = *reinterpret_cast<const uint4*>(w + 32 * part + 16 * i);
          b[2 * i] = expand_int8(words.x, words.y, quad, scale);
          b[2 * i + 1] = expand_int8(words.z, words.w, quad, scale);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int t = 0; t < kTokens / 16; ++t) {
          uint32_t a[4];
          const int row = 16 * t + lane % 16, chunk = 4 * part + 2 * i + lane / 16;
          load_matrices(a, chunk_of(base + offset, row, chunk));
          mma_bf16(sums[t], a, b[2 * i], b[2 * i + 1]);
        }
    }
  }
  if (in.adapter != nullptr) add_tail<kTokens>(in, sums, first_row + 8 * warp, group, quad);
  const int column = first_row + 8 * warp + 2 * quad;
  if (column >= in.n) return;
  float bias[2] = {};
  if (in.bias != nullptr)
    for (int i = 0; i < 2; ++i) bias[i] = to_float(in.bias[column + i]);
#pragma unroll
  for (int t = 0; t < kTokens / 16; ++t)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = 16 * t + group + 8 * half;
      if (token >= in.m) continue;
      float y[2] = {sums[t][2 * half], sums[t][2 * half + 1]};
      if (in.bias != nullptr)
        for (int i = 0; i < 2; ++i) y[i] += bias[i];
      *reinterpret_cast<uint32_t*>(in.y + token * in.y_stride + column) = pack_bf16(y[0], y[1]);
    }
}

template <bool kIsNf4>
void run(const Operands& in, Device device) {
  const auto start = [&]<int kTokens, int kStages>() {
    launch("quantized_gemm", quantized_gemm_kernel<kIsNf4, kTokens, kStages>,
           {blocks_for(in.n, kTileRows), kThreads, Tiling<kIsNf4, kTokens, kStages>::kShared},
           device, in);
  };
  if (in.m <= 16) return start.template operator()<16, 10>();
  if (in.m <= 32) return start.template operator()<32, 7>();
  start.template operator()<64, 4>();
}

}  // namespace

bool reads_quantized(int64_t rows, const QuantizedWeight& w, int64_t tail, bool with_bias) {
  const int64_t n = w.values.dim(0);
  const auto sized = [&](const Shape& shape) {
    return Tensor::without_elements(shape, DType::kBF16, w.values.device());
  };
  return rows > 0 && rows <= kMostRows && w.columns % 64 == 0 && n % 8 == 0 && tail % 16 == 0 &&
         std::max(n, w.columns) < int64_t{1} << 30 &&
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
  COHORT_CHECK(aligned(in.x, in.values) && in.x_stride % 8 == 0 && in.y_stride % 2 == 0,
               "[quantized_linear] expected rows aligned to 16 bytes, got ", x.str());
  if (w.is_nf4())
    run<true>(in, x.device());
  else
    run<false>(in, x.device());
}

}  // namespace cohort::kernels::cuda
