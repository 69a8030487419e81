// Skinny GEMM of weights in 8 or 4 bits: one thread loads them by TMA, behind a stage's operands,
// and warps write their values in bf16 to the stage.
#include "kernels/cuda/sm90/skinny_gemm.cuh"
#include "kernels/quantized_weight.h"

namespace cohort::kernels::cuda {

// Byte i of the result is byte s_i of a and b, s_i the i-th four bits of the selector, below 8:
// __byte_perm() without its mask of the selector.
__device__ __forceinline__ uint32_t select_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;\n" : "=r"(out) : "r"(a), "r"(b), "r"(selector));
  return out;
}

// Four integers of 8 bits times the scale. An integer with its offset of 128 in the low bits of
// 2^23 is exactly a float.
__device__ __forceinline__ uint2 expand_int8(uint32_t word, float scale) {
  const auto value = [&](int index) {
    const uint32_t bits = __byte_perm(word ^ 0x80808080u, 0x4b000000u, 0x7550 + index);
    return (__uint_as_float(bits) - 8388736.0f) * scale;
  };
  return {pack_bf16(value(0), value(1)), pack_bf16(value(2), value(3))};
}

// The 16 values of nf4 times a scale, in bf16: the lower and the upper byte of each.
struct Nf4Values {
  uint32_t low[4], high[4];

  __device__ __forceinline__ explicit Nf4Values(float scale) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t a = pack_bf16(nf4_value(4 * i) * scale, nf4_value(4 * i + 1) * scale),
                     b = pack_bf16(nf4_value(4 * i + 2) * scale, nf4_value(4 * i + 3) * scale);
      low[i] = select_bytes(a, b, 0x6420);
      high[i] = select_bytes(a, b, 0x7531);
    }
  }
  // The values of a word's eight indices, of which each byte has its first in its upper half. Three
  // bits of an index select one of eight bytes; the fourth chooses between the values from 8 on and
  // those before.
  __device__ __forceinline__ uint4 expand(uint32_t word) const {
    const uint32_t indices = word & 0x77777777u, choice = (word >> 1 & 0x44444444u) | 0x32103210u;
    const uint2 first = expand(indices, choice), second = expand(indices >> 16, choice >> 16);
    return {first.x, first.y, second.x, second.y};
  }
  __device__ __forceinline__ uint2 expand(uint32_t indices, uint32_t choice) const {
    const auto find = [&](const uint32_t(&table)[4]) {
      return select_bytes(select_bytes(table[0], table[1], indices),
                          select_bytes(table[2], table[3], indices), choice);
    };
    const uint32_t lower = find(low), upper = find(high);
    return {select_bytes(lower, upper, 0x4051), select_bytes(lower, upper, 0x6273)};
  }
};

__device__ __forceinline__ void store_chunk(uint32_t to, const uint4& chunk) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "r"(chunk.x), "r"(chunk.y),
               "r"(chunk.z), "r"(chunk.w)
               : "memory");
}

__device__ __forceinline__ uint4 load_chunk(uint32_t from) {
  uint4 chunk;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w)
               : "r"(from)
               : "memory");
  return chunk;
}

// A stage's rows, of both boxes, are units of 32, one for each lane. A warp has the same unit of
// every kStride-th stage; kStride divides the number of stages, so that these are always the same
// ones, and the full barrier for which it waits is never in the phase before. The last warp loads
// the numbers.
template <bool kIsNf4, int kStride>
struct QuantizedWeights {
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kGroup = kIsNf4 ? 64 : 128;
  static constexpr int kNumbers = kIsNf4 ? 64 : 128;  // bytes of the 128 columns of a stage
  static constexpr int kWords = kNumbers / 32;        // the 64 columns of a box, in 16 bytes each

  CUtensorMap map;  // numbers: kNumbers bytes of a tile's rows at a time, with a swizzle
  const float* scales;
  const bf16* adapter;  // [n, tail]
  int k, tail, groups;  // k: without the tail

  static constexpr int arrivals(int rows) { return 2 * rows / 32; }
  static constexpr int source_bytes(int rows) { return rows * kNumbers; }
  static constexpr int warps(int rows) { return arrivals(rows) * kStride + 1; }

  // A stage, of all that the block fills.
  template <class T>
  struct Stage {
    PipelineState<T::kStages> state;
    int tile = static_cast<int>(blockIdx.x), step = 0;

    __device__ __forceinline__ void advance(int stages, int steps) {
      state.index += stages;
      if (state.index >= T::kStages) {
        state.index -= T::kStages;
        state.phase ^= 1;
      }
      for (step += stages; step >= steps; step -= steps) tile += static_cast<int>(gridDim.x);
    }
  };

  // Writes the values of 64 columns of a row of numbers, of which `chunk` is the first of 16 bytes,
  // to row `to` of a box.
  static __device__ __forceinline__ void expand(uint32_t to, uint32_t from, int chunk,
                                                float scale) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const uint32_t swizzle = lane % 8 * 16, source_swizzle = kIsNf4 ? lane / 2 % 4 : lane % 8;
    uint4 words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i)
      words[i] = load_chunk(from + ((chunk + i) ^ source_swizzle) * 16);
    if constexpr (kIsNf4) {
      const Nf4Values table(scale);
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        store_chunk(to + (swizzle ^ 4 * i * 16), table.expand(words[i].x));
        store_chunk(to + (swizzle ^ (4 * i + 1) * 16), table.expand(words[i].y));
        store_chunk(to + (swizzle ^ (4 * i + 2) * 16), table.expand(words[i].z));
        store_chunk(to + (swizzle ^ (4 * i + 3) * 16), table.expand(words[i].w));
      }
    } else {
      const auto store = [&](int at, uint32_t first, uint32_t second) {
        const uint2 low = expand_int8(first, scale), high = expand_int8(second, scale);
        store_chunk(to + (swizzle ^ at * 16), {low.x, low.y, high.x, high.y});
      };
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        store(2 * i, words[i].x, words[i].y);
        store(2 * i + 1, words[i].z, words[i].w);
      }
    }
  }
  // Likewise of the adapter's columns behind k, and zeros behind these.
  __device__ __forceinline__ void copy_tail(uint32_t to, int row, int column) const {
    const uint32_t swizzle = threadIdx.x % 8 * 16;
    const bf16* const from = adapter + (int64_t{row} * tail + column - k);
#pragma unroll 1
    for (int chunk = 0; chunk < 8; ++chunk)
      store_chunk(
          to + (swizzle ^ chunk * 16),
          column < k + tail ? __ldg(reinterpret_cast<const uint4*>(from) + chunk) : uint4{});
  }

  template <class T>
  __device__ void write(const OperandStages<T>& stages, const SkinnySizes& size, int warp) const {
    constexpr int kUnits = arrivals(T::kRows);
    static_assert(T::kRows % 16 == 0 && T::kStages % kStride == 0 && T::kParts == 1 &&
                  T::kBlocksPerSm == 1 && T::kStageBytes % 1024 == 0 && T::kSource % 1024 == 0);
    if (warp == kUnits * kStride) {
      if (threadIdx.x % 32 != 0) return;
      return load_operand(stages, size, size.may_prefetch_w ? INT_MAX : 0, 1, T::kBytesSource,
                          [&](uint32_t stage, int tile, int step, uint32_t barrier) {
                            tma_load(stage + T::kSource, &map,
                                     {step * kNumbers / 2, T::first_row(size, tile), 0, 0},
                                     barrier);
                          });
    }
    if (!size.may_prefetch_w) wait_on_dependent_grids();
    const int steps = size.steps(), item = warp % kUnits * 32 + static_cast<int>(threadIdx.x % 32),
              box = item / T::kRows, row = item % T::kRows;
    Stage<T> stage;
    stage.advance(warp / kUnits, steps);
    const auto column = [&] { return (2 * stage.step + box) * kBox; };
    const auto row_of_w = [&] { return min(T::first_row(size, stage.tile) + row, size.n - 1); };
    const auto load_scale = [&] {
      return stage.tile < size.tiles && column() < k
                 ? __ldg(scales + (int64_t{row_of_w()} * groups + column() / kGroup))
                 : 0.0f;
    };
    float next_scale = load_scale();
    while (stage.tile < size.tiles) {
      const uint32_t address = stages.address(stage.state.index);
      const uint32_t to = address + item * kRowBytes;
      const PipelineState<T::kStages> state = stage.state;
      const int at = column(), w_row = row_of_w();
      const float scale = next_scale;
      stage.advance(kStride, steps);
      next_scale = load_scale();
      barrier_wait(stages.pipeline.full(state.index, 1), state.phase);
      __syncwarp();
      if (at < k)
        expand(to, address + T::kSource + row * kNumbers, box * kWords, scale);
      else
        copy_tail(to, w_row, at);
      stages.pipeline.producer_commit_warp(state);
    }
  }
};

namespace {

// The numbers as elements of 16 bits, for boxes of kNumbers bytes of `box_rows` rows.
template <class Weights>
CUtensorMap numbers_tensor_map(const Tensor& values, int box_rows) {
  const auto rows = static_cast<cuuint64_t>(values.dim(0)),
             row_bytes = static_cast<cuuint64_t>(values.dim(1));
  return make_tensor_map({.t = values,
                          .sizes = {row_bytes / 2, rows, 1, 1},
                          .strides = {row_bytes, rows * row_bytes, rows * row_bytes},
                          .box = {Weights::kNumbers / 2, static_cast<cuuint32_t>(box_rows), 1, 1}});
}

template <bool kIsNf4>
void dispatch(const SkinnyGemm& args, const QuantizedLinear& in) {
  const int64_t m = args.x.rows(), n = args.y.cols();
  const auto run = [&]<int kTokens, int kRows, int kWarpTokens, int kWarpRows, int kStride>() {
    using Weights = QuantizedWeights<kIsNf4, kStride>;
    // As many stages as fit, with their barriers.
    constexpr int kStage = 2 * (kTokens + kRows) * kRowBytes + Weights::source_bytes(kRows) + 24;
    constexpr int kStages = std::min(16, (kSharedPerSm - 1024) / kStage) / kStride * kStride;
    using T = SkinnyTiling<bf16, Weights, kTokens, kRows, kWarpTokens, kWarpRows, kStages>;
    run_skinny<T>(args, {.map = numbers_tensor_map<Weights>(in.w.values, kRows),
                         .scales = in.w.scales.data<float>(),
                         .adapter = pointer<bf16>(in.adapter),
                         .k = static_cast<int>(in.w.columns),
                         .tail = static_cast<int>(args.tail),
                         .groups = static_cast<int>(in.w.scales.dim(1))});
  };
  // Rows of w of which 132 multiprocessors have a tile each, or from 132 * 80 on two of 112. The
  // strides let 8 to 16 warps expand: fewer with many registers of the consumers, or few stages.
  if (n <= 132 * 16) {
    if (m <= 16) return run.template operator()<16, 16, 16, 8, 16>();
    if (m <= 32) return run.template operator()<32, 16, 16, 16, 8>();
    return run.template operator()<64, 16, 16, 16, 8>();
  }
  if (n <= 132 * 32) {
    if (m <= 16) return run.template operator()<16, 32, 16, 8, 7>();
    if (m <= 32) return run.template operator()<32, 32, 32, 8, 5>();
    return run.template operator()<64, 32, 32, 16, 8>();
  }
  if (n <= 132 * 48) {
    if (m <= 16) return run.template operator()<16, 48, 16, 16, 5>();
    if (m <= 32) return run.template operator()<32, 48, 32, 16, 4>();
    return run.template operator()<64, 48, 32, 24, 3>();
  }
  if (m <= 16 && n > 132 * 80) return run.template operator()<16, 112, 16, 16, 2>();
  if (m <= 16) return run.template operator()<16, 80, 16, 16, 3>();
  if (m <= 32) return run.template operator()<32, 80, 32, 16, 2>();
  run.template operator()<64, 80, 32, 40, 2>();
}

}  // namespace

bool is_quantized_skinny(Device device, int64_t rows, const QuantizedWeight& w, int64_t tail) {
  return rows > 0 && rows <= kSkinnyRows && w.columns % kBox == 0 && tail % kBox == 0 &&
         is_skinny({rows, 8, kBox}, device);
}

void quantized_skinny_gemm(const QuantizedLinear& args) {
  const SkinnyGemm gemm{.y = args.y,
                        .x = args.x,
                        .w = args.w.values,
                        .bias = args.bias,
                        .tail = args.adapter.defined() ? args.adapter.dim(1) : 0};
  if (args.w.is_nf4())
    dispatch<true>(gemm, args);
  else
    dispatch<false>(gemm, args);
}

}  // namespace cohort::kernels::cuda
