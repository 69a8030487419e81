// Skinny GEMM, limited by reading the weights and by the latency of one accumulation over k.
//
// An output is one chain of mma.m16n8k16 with ascending k (a step takes 24 cycles on an H200), so
// work is split over outputs, never over k. A block computes tiles of kTokens rows of x and kRows
// rows of w in sequence. Producer warps write w and x into a pipeline of stages, x by TMA; the
// consumer warps multiply, each a part of the tile. A stage holds 128 columns as two boxes of 64
// (128 bytes) with the TMA swizzle, so that ldmatrix has no bank conflicts. The operand registers
// of a box are loaded during the multiplication of the previous one, so a chain waits only for
// itself.
//
// If K is an odd number of boxes, the second box of the last stage has zeros, which change no sum.
//
// The columns of x before its tail are complete when the kernel starts (LinearForward): they are
// loaded before it waits for the previous one.
//
// For gated outputs half of a tile's rows of w belong to the gate and half, with the same indices,
// to up. A warp has both for its outputs and combines them in registers.
//
// Weights: how w gets into a stage. It is the kernel's argument and has a tensor map `map` and
//   warps(rows): the number of warps that write tiles of so many rows
//   arrivals(rows): the number of arrivals with which they complete a stage
//   source_bytes(rows): bytes of a stage from which they make it; 0: w itself is loaded
//   kBlocksPerSm: for __launch_bounds__
//   write<T>(stages, size, warp): their loop, each for all of the block's tiles.
#pragma once

#include <algorithm>
#include <climits>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/sm90/pipeline.cuh"
#include "kernels/cuda/sm90/skinny_gemm.h"

namespace cohort::kernels::cuda {

inline constexpr int kBox = 64, kRowBytes = kBox * int{sizeof(bf16)};
// Shared memory of sm_90, for which the tilings are chosen.
inline constexpr int kSharedPerSm = 227 << 10, kSharedReservedPerBlock = 1 << 10;

struct SkinnySizes {
  int m, n, k;  // n: outputs per row of x
  int x_body;   // columns of x that are complete when the kernel starts
  int tiles;
  int shift;  // 1 << shift adjacent tiles share rows of w, so that w is read once
  bool may_prefetch_w;

  __device__ int steps() const { return (k / kBox + 1) / 2; }  // stages of a tile
};

template <class Out>
struct SkinnyEpilogue {
  Out* y;
  int64_t y_stride;  // elements from a row to the next
  const bf16* bias;
  Activation op;  // if kParts is 2
};

// Tile of a block, tile of a warp, and number of pipeline stages. The rows of w of a tile and of a
// warp are divided over kParts parts of w: one, or gate and up.
template <class Out_, class Weights_, int kTokens_, int kRows_, int kWarpTokens_, int kWarpRows_,
          int kStages_, int kParts_ = 1>
struct SkinnyTiling {
  using Out = Out_;
  using Weights = Weights_;
  static constexpr int kTokens = kTokens_, kRows = kRows_, kStages = kStages_;
  static constexpr int kWarpTokens = kWarpTokens_, kWarpRows = kWarpRows_;
  static constexpr int kParts = kParts_;
  static constexpr int kPartRows = kRows / kParts, kWarpPartRows = kWarpRows / kParts;
  static constexpr int kAcross = kTokens / kWarpTokens;
  // Consumer warps. The last ones may have rows past the end of the tile: they multiply what
  // follows it in the stage and do not write the results.
  static constexpr int kConsumers = kAcross * ((kPartRows + kWarpPartRows - 1) / kWarpPartRows);
  // The last warp loads x.
  static constexpr int kThreads = 32 * (kConsumers + Weights::warps(kRows) + 1);
  // Stage layout: two boxes of w, then two of x, then what w is made from.
  static constexpr int kBytesW = 2 * kRows * kRowBytes, kBytesX = 2 * kTokens * kRowBytes;
  static constexpr int kBytesSource = Weights::source_bytes(kRows), kSource = kBytesW + kBytesX;
  static constexpr int kStageBytes = kSource + kBytesSource;
  // The full barrier of w and x, and that of the source of w.
  using Barriers = Pipeline<kStages, kBytesSource == 0 ? 1 : 2>;
  // Boxes are aligned to the 1 KiB period of the swizzle. The barriers follow the stages.
  static constexpr int kShared = 1024 + kStages * kStageBytes + Barriers::kBytes;
  static constexpr int kBlocksPerSm =
      (kSharedPerSm + kSharedReservedPerBlock) / (kShared + kSharedReservedPerBlock);

  // First row of x, and of each part of w, in a tile.
  static __device__ int first_token(const SkinnySizes& size, int tile) {
    return (tile & ((1 << size.shift) - 1)) * kTokens;
  }
  static __device__ int first_row(const SkinnySizes& size, int tile) {
    return (tile >> size.shift) * kPartRows;
  }
  static_assert(kPartRows % 8 == 0 && kWarpPartRows % 8 == 0 && kTokens % 16 == 0 &&
                kStages <= kThreads && kBlocksPerSm > 0);
};

// Stages of operands, from shared address `base` on, and their barriers.
template <class T>
struct OperandStages {
  uint32_t base;
  typename T::Barriers pipeline{base + T::kStages * T::kStageBytes};

  __device__ uint32_t address(int stage) const { return base + stage * T::kStageBytes; }
};

// Producer loop of one thread: load(address of the stage, tile, step, barrier) starts a copy of
// `bytes` for the full barrier `full`. Waits for the previous grids before the first stage with
// columns from `complete` on.
template <class T, class Load>
__device__ void load_operand(const OperandStages<T>& stages, const SkinnySizes& size, int complete,
                             int full, int bytes, const Load& load) {
  ProducerState<T::kStages> state;
  for (int tile = blockIdx.x; tile < size.tiles; tile += gridDim.x) {
    for (int step = 0; step < size.steps(); ++step) {
      if ((step + 1) * 2 * kBox > complete) {
        wait_on_dependent_grids();
        complete = INT_MAX;
      }
      stages.pipeline.producer_acquire(state);
      stages.pipeline.producer_commit_expect_tx(state, bytes, full);
      load(stages.address(state.index), tile, step, stages.pipeline.full(state.index, full));
      state.advance();
    }
  }
}

// Same arithmetic as the elementwise kernel of the op.
template <class Op, class Out>
__device__ Pack<Out, 2> gated(const Pack<Out, 2>& gate, const Pack<Out, 2>& up) {
  Pack<Out, 2> y;
#pragma unroll
  for (int e = 0; e < 2; ++e)
    y.v[e] = from_float<Out>(Op::forward(to_float(gate.v[e]), to_float(up.v[e])));
  return y;
}

// A warp's tile: kA tiles of 16 rows of x times kB tiles of 8 rows of w, kPartB of each part.
template <class T>
struct WarpTile {
  static constexpr int kA = T::kWarpTokens / 16, kB = T::kWarpRows / 8, kPartB = kB / T::kParts;
  // Operands of a box: four steps of 16 columns; w in two halves of two steps.
  struct Operands {
    uint32_t x[4][kA][4], w[2][kB][4];
  };
  float accumulators[kA][kB][4] = {};
  uint32_t x_offset, w_offset, x_swizzle, w_swizzle;  // per lane, in a stage

  __device__ WarpTile(int warp, int lane)
      : x_offset(T::kBytesW + (warp % T::kAcross * T::kWarpTokens + lane % 16) * kRowBytes),
        w_offset((warp / T::kAcross * T::kWarpPartRows + lane % 8) * kRowBytes),
        x_swizzle((lane / 16 ^ lane % 8) * 16),
        w_swizzle((lane / 8 ^ lane % 8) * 16) {}

  __device__ void load(Operands& to, uint32_t stage, int box) const {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int i = 0; i < kA; ++i)
        load_matrices(to.x[step][i], stage + x_offset + (box * T::kTokens + i * 16) * kRowBytes +
                                         (x_swizzle ^ step * 32));
      if (step % 2 == 1) continue;
#pragma unroll
      for (int j = 0; j < kB; ++j)
        load_matrices(
            to.w[step / 2][j],
            stage + w_offset +
                (box * T::kRows + j / kPartB * T::kPartRows + j % kPartB * 8) * kRowBytes +
                (w_swizzle ^ step * 32));
    }
  }

  template <int kFrom, int kTo>
  __device__ void multiply(const Operands& box) {
#pragma unroll
    for (int step = kFrom; step < kTo; ++step)
#pragma unroll
      for (int i = 0; i < kA; ++i)
#pragma unroll
        for (int j = 0; j < kB; ++j)
          mma_bf16(accumulators[i][j], box.x[step][i], box.w[step / 2][j][step % 2 * 2],
                   box.w[step / 2][j][step % 2 * 2 + 1]);
  }

  // Writes the outputs of the tile, each from the values of all parts, and clears the accumulators.
  template <class Output>
  __device__ void finish(const SkinnyEpilogue<typename T::Out>& to, const SkinnySizes& size,
                         int tile, const Output& output) {
    using Pair = Pack<typename T::Out, 2>;
    const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
    const int m0 = T::first_token(size, tile) + warp % T::kAcross * T::kWarpTokens + group;
    const int row0 = warp / T::kAcross * T::kWarpPartRows + quad * 2;  // in the tile
#pragma unroll
    for (int j = 0; j < kPartB; ++j) {
      const int row = row0 + j * 8, n = T::first_row(size, tile) + row;
      const bool inside = row < T::kPartRows && n < size.n;  // N is even
      float bias[T::kParts][2] = {};
      if (inside && to.bias != nullptr)
#pragma unroll
        for (int part = 0; part < T::kParts; ++part)
#pragma unroll
          for (int e = 0; e < 2; ++e) bias[part][e] = to_float(to.bias[part * size.n + n + e]);
#pragma unroll
      for (int i = 0; i < kA; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int m = m0 + i * 16 + h * 8;
          Pair values[T::kParts];
#pragma unroll
          for (int part = 0; part < T::kParts; ++part)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float& c = accumulators[i][part * kPartB + j][2 * h + e];
              // Without a bias 0 must not be added: -0 + 0 is +0.
              values[part].v[e] =
                  from_float<typename T::Out>(to.bias != nullptr ? c + bias[part][e] : c);
              c = 0;
            }
          if (inside && m < size.m) store_pack(to.y + m * to.y_stride + n, output(values));
        }
    }
  }
  __device__ void finish(const SkinnyEpilogue<typename T::Out>& to, const SkinnySizes& size,
                         int tile) {
    using Pair = Pack<typename T::Out, 2>;
    if constexpr (T::kParts == 1) {
      finish(to, size, tile, [](const Pair(&outputs)[1]) { return outputs[0]; });
    } else {
      switch (to.op) {
#define COHORT_FINISH(Op, name) \
  case Activation::k##Op:       \
    return finish(to, size, tile, [](const Pair(&v)[2]) { return gated<Op>(v[0], v[1]); });
        COHORT_GATED_OPS(COHORT_FINISH)
#undef COHORT_FINISH
        default:
          return;
      }
    }
  }
};

// An iteration of the inner loop has the last three steps of one stage and the first five of the
// next, because the compiler moves loads only within an iteration, and sinks them to just before
// their use if that is in another one.
template <class T>
__device__ void multiply_tiles(const SkinnyEpilogue<typename T::Out>& to,
                               const OperandStages<T>& stages, const SkinnySizes& size) {
  const int steps = size.steps();
  const auto pipeline = stages.pipeline;
  PipelineState<T::kStages> state;
  WarpTile<T> warp_tile(threadIdx.x / 32, threadIdx.x % 32);
  typename WarpTile<T>::Operands even, odd;  // boxes
  bool ready = false;
  const auto load_even = [&] {
    if (!ready) pipeline.consumer_wait(state);
    __syncwarp();
    warp_tile.load(even, stages.address(state.index), 0);
  };
  const auto first_steps = [&] {
    const uint32_t address = stages.address(state.index);
    state.advance();
    // Testing the next stage's barrier early hides its latency.
    ready = barrier_is_done(pipeline.full(state.index), state.phase);
    warp_tile.template multiply<0, 1>(even);
    warp_tile.load(odd, address, 1);
    warp_tile.template multiply<1, 4>(even);
    warp_tile.template multiply<0, 1>(odd);
  };
  for (int tile = blockIdx.x; tile < size.tiles; tile += gridDim.x) {
    uint32_t empty = pipeline.empty(state.index);
    load_even();
    first_steps();
    for (int i = 1; i < steps; ++i) {
      const uint32_t next = pipeline.empty(state.index);
      load_even();
      warp_tile.template multiply<1, 4>(odd);
      arrive_once_per_warp(empty);
      empty = next;
      first_steps();
    }
    warp_tile.template multiply<1, 4>(odd);
    arrive_once_per_warp(empty);
    warp_tile.finish(to, size, tile);
  }
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, T::Weights::kBlocksPerSm)
    skinny_kernel(const SkinnyEpilogue<typename T::Out> to, const __grid_constant__ CUtensorMap x,
                  const __grid_constant__ typename T::Weights w, const SkinnySizes size) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ char shared[];
  const int warp = threadIdx.x / 32, thread = threadIdx.x;
  const OperandStages<T> stages{(shared_address(shared) + 1023) / 1024 * 1024};
  if (thread < T::kStages) {
    barrier_init(stages.pipeline.full(thread), 1 + T::Weights::arrivals(T::kRows));
    if constexpr (T::kBytesSource > 0) barrier_init(stages.pipeline.full(thread, 1), 1);
    barrier_init(stages.pipeline.empty(thread), T::kConsumers);
  }
  const bool is_x = warp == T::kThreads / 32 - 1;
  if (is_x && thread % 32 == 0) tma_prefetch(&x);
  if (warp == T::kConsumers && thread % 32 == 0) tma_prefetch(&w.map);
  __syncthreads();
  launch_dependent_grids();
  if (warp < T::kConsumers) {
    wait_on_dependent_grids();
    multiply_tiles<T>(to, stages, size);
  } else if (!is_x) {
    w.template write<T>(stages, size, warp - T::kConsumers);
  } else if (thread % 32 == 0) {
    load_operand(
        stages, size, size.x_body, 0, T::kBytesX,
        [&](uint32_t stage, int tile, int step, uint32_t barrier) {
          tma_load(stage + T::kBytesW, &x, {0, T::first_token(size, tile), 0, 2 * step}, barrier);
        });
  }
#endif
}

// Tensor map of t[parts rows, cols] as [cols / 64, parts, rows, 64] with boxes of
// [2, parts, box_rows, 64], one per stage.
inline CUtensorMap operand_tensor_map(const Tensor& t, int parts, int box_rows) {
  const auto rows = static_cast<cuuint64_t>(t.rows() / parts),
             boxes = static_cast<cuuint64_t>(t.cols() / kBox);
  const cuuint64_t row_bytes = static_cast<cuuint64_t>(RowOffsets(t).outer) * sizeof(bf16);
  return make_tensor_map(
      {.t = t,
       .sizes = {kBox, rows, static_cast<cuuint64_t>(parts), boxes},
       .strides = {row_bytes, rows * row_bytes, kRowBytes},
       .box = {kBox, static_cast<cuuint32_t>(box_rows), static_cast<cuuint32_t>(parts), 2}});
}

// Runs the kernel for all outputs; `op` is used if T has two parts.
template <class T>
void run_skinny(const SkinnyGemm& args, const typename T::Weights& w, Activation op = {}) {
  const int64_t k = args.x.cols();
  SkinnySizes size{.m = static_cast<int>(args.x.rows()),
                   .n = static_cast<int>(args.y.cols()),
                   .k = static_cast<int>(k),
                   .x_body = args.tail > 0 ? static_cast<int>(k - args.tail) : 0,
                   .may_prefetch_w = current_stream(args.x.device()).may_prefetch};
  size.shift = size.m > T::kTokens ? 1 : 0;
  size.tiles = ((size.n + T::kPartRows - 1) / T::kPartRows) << size.shift;
  const Device device = args.x.device();
  const int blocks = std::min(
      size.tiles, ::cohort::cuda::gpu_properties(device).multiprocessors * T::kBlocksPerSm);
  launch("skinny_gemm", skinny_kernel<T>,
         {.grid = static_cast<unsigned>(blocks),
          .block = T::kThreads,
          .shared_bytes = T::kShared,
          .start = Start::kProgrammatic},
         device,
         SkinnyEpilogue<typename T::Out>{pointer<typename T::Out>(args.y), RowOffsets(args.y).outer,
                                         pointer<bf16>(args.bias), op},
         operand_tensor_map(args.x, 1, T::kTokens), w, size);
}

}  // namespace cohort::kernels::cuda
