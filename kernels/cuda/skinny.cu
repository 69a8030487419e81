// Products of few rows, bound by reading the weights and by how long one sum over k takes.
//
// An output is one chain of mma.m16n8k16 with ascending k (a step takes 24 cycles on an H200), so
// blocks share out outputs, never k. A block computes tiles of kTokens rows of x and kRows rows of
// w one after the other. One thread of a warp copies pieces of w, one of another warp those of x,
// by the copy engine into a ring of stages; the other warps multiply, each its part of the tile. A
// stage holds 128 columns as two boxes of 64 (128 bytes), swizzled by the copy engine so that
// ldmatrix has no bank conflicts. The registers for a box are loaded while the box before it is
// multiplied: a chain waits for nothing but itself.
//
// Where the outputs are gated, half of a tile's rows of w are of the gate and half, the same ones,
// of up. A warp has both for its outputs, so that they meet in its registers.
#include "kernels/cuda/skinny.h"

#include <algorithm>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/tma.cuh"

namespace cohort::kernels::cuda {
namespace {

using Bf16 = __nv_bfloat16;
constexpr int kBox = 64, kStageColumns = 2 * kBox, kRowBytes = kBox * int{sizeof(Bf16)};
constexpr int kSharedPerSm = 227 << 10, kSharedReserved = 1 << 10;  // of sm_90, for a block

struct Sizes {
  int m, n, k;  // n: outputs of a row of x
  int tiles;
  int shift;  // 1 << shift tiles share rows of w; they are neighbours, so that w is read once
  bool reads_early;  // of w (EarlyReads)
};

// What becomes of the sums.
template <class Out>
struct Target {
  Out* y;
  const Bf16* bias;
  Activation op;  // with two parts
};

// How a block of `Out` is made: its tile, the part of a warp, the stages of its ring. The rows of w
// of a tile, and those of a warp, are of kParts parts of w: one, or gate and up.
template <class Out_, int kTokens_, int kRows_, int kWarpTokens_, int kWarpRows_, int kStages_,
          int kParts_ = 1>
struct Tiling {
  using Out = Out_;
  static constexpr int kTokens = kTokens_, kRows = kRows_, kStages = kStages_;
  static constexpr int kWarpTokens = kWarpTokens_, kWarpRows = kWarpRows_;
  static constexpr int kParts = kParts_;
  static constexpr int kPartRows = kRows / kParts, kWarpPartRows = kWarpRows / kParts;
  static constexpr int kAcross = kTokens / kWarpTokens;
  // Warps that multiply. The last ones may have rows past the tile's: what lies behind it in the
  // stage is multiplied, too, and not written.
  static constexpr int kConsumers = kAcross * ((kPartRows + kWarpPartRows - 1) / kWarpPartRows);
  static constexpr int kThreads = 32 * (kConsumers + 2);
  // A stage: the two boxes of w, then those of x.
  static constexpr int kBytesW = 2 * kRows * kRowBytes, kBytesX = 2 * kTokens * kRowBytes;
  static constexpr int kStageBytes = kBytesW + kBytesX;
  // Boxes are aligned to 1 KiB, the period of the swizzle. The barriers follow the stages.
  static constexpr int kShared = 1024 + kStages * (kStageBytes + 2 * int{sizeof(uint64_t)});
  static constexpr int kBlocksPerSm =
      (kSharedPerSm + kSharedReserved) / (kShared + kSharedReserved);

  // The first row of x, and of each part of w, in a tile.
  static __device__ int first_token(const Sizes& size, int tile) {
    return (tile & ((1 << size.shift) - 1)) * kTokens;
  }
  static __device__ int first_row(const Sizes& size, int tile) {
    return (tile >> size.shift) * kPartRows;
  }
  static_assert(kPartRows % 8 == 0 && kWarpPartRows % 8 == 0 && kTokens % 16 == 0 &&
                kStages <= kThreads && kBlocksPerSm > 0);
};

// Where a block is in the ring.
template <class T>
struct Ring {
  uint32_t base;
  int stage = 0;
  uint32_t parity = 0;

  __device__ uint32_t at() const { return base + stage * T::kStageBytes; }
  __device__ uint32_t full() const { return base + T::kStages * T::kStageBytes + stage * 8; }
  __device__ uint32_t empty() const { return full() + T::kStages * 8; }
  __device__ void advance() {
    if (++stage < T::kStages) return;
    stage = 0;
    parity ^= 1;
  }
};

// One thread copies all pieces of w or of x that the block's tiles need.
template <class T>
__device__ void copy_pieces(const CUtensorMap* map, bool is_w, Ring<T> ring, const Sizes& size) {
  bool first_round = true;
  for (int tile = blockIdx.x; tile < size.tiles; tile += gridDim.x) {
    const int row = is_w ? T::first_row(size, tile) : T::first_token(size, tile);
    for (int box = 0; box < size.k / kBox; box += 2) {
      // A stage that was never full is empty; the first one to be emptied ends a phase of parity 0.
      if (!first_round) barrier_wait(ring.empty(), ring.parity ^ 1);
      barrier_arrive_expect(ring.full(), is_w ? T::kBytesW : T::kBytesX);
      tma_load(ring.at() + (is_w ? 0 : T::kBytesW), map, {0, row, 0, box}, ring.full());
      ring.advance();
      first_round = first_round && ring.stage > 0;
    }
  }
}

// What the elementwise kernel of the op makes of these.
template <class Op, class Out>
__device__ Pack<Out, 2> gated(const Pack<Out, 2>& gate, const Pack<Out, 2>& up) {
  Pack<Out, 2> y;
#pragma unroll
  for (int e = 0; e < 2; ++e)
    y.v[e] = from_float<Out>(Op::forward(to_float(gate.v[e]), to_float(up.v[e])));
  return y;
}

// A warp's part of a tile: kA tiles of 16 rows of x times kB of 8 rows of w, kPartB of each part.
template <class T>
struct WarpTile {
  static constexpr int kA = T::kWarpTokens / 16, kB = T::kWarpRows / 8, kPartB = kB / T::kParts;
  // The operands of a box: four steps of 16 columns, and of w two halves of two steps.
  struct Operands {
    uint32_t x[4][kA][4], w[2][kB][4];
  };
  float sum[kA][kB][4] = {};
  uint32_t from_x, from_w, swizzle_x, swizzle_w;  // of this lane, in a stage

  __device__ WarpTile(int warp, int lane)
      : from_x(T::kBytesW + (warp % T::kAcross * T::kWarpTokens + lane % 16) * kRowBytes),
        from_w((warp / T::kAcross * T::kWarpPartRows + lane % 8) * kRowBytes),
        swizzle_x((lane / 16 ^ lane % 8) * 16),
        swizzle_w((lane / 8 ^ lane % 8) * 16) {}

  __device__ void load(Operands& to, uint32_t stage, int box) const {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int i = 0; i < kA; ++i)
        load_matrices(to.x[step][i], stage + from_x + (box * T::kTokens + i * 16) * kRowBytes +
                                         (swizzle_x ^ step * 32));
      if (step % 2 == 1) continue;
#pragma unroll
      for (int j = 0; j < kB; ++j)
        load_matrices(
            to.w[step / 2][j],
            stage + from_w +
                (box * T::kRows + j / kPartB * T::kPartRows + j % kPartB * 8) * kRowBytes +
                (swizzle_w ^ step * 32));
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
          mma_bf16(sum[i][j], box.x[step][i], box.w[step / 2][j][step % 2 * 2],
                   box.w[step / 2][j][step % 2 * 2 + 1]);
  }

  // Writes the tile's outputs, each of the values that its parts have there, and starts the next
  // sums.
  template <class Output>
  __device__ void finish(const Target<typename T::Out>& to, const Sizes& size, int tile,
                         const Output& output) {
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
              float& c = sum[i][part * kPartB + j][2 * h + e];
              // Without a bias nothing is added: -0 + 0 is +0.
              values[part].v[e] =
                  from_float<typename T::Out>(to.bias != nullptr ? c + bias[part][e] : c);
              c = 0;
            }
          if (inside && m < size.m) store_pack(to.y + int64_t{m} * size.n + n, output(values));
        }
    }
  }
  __device__ void finish(const Target<typename T::Out>& to, const Sizes& size, int tile) {
    using Pair = Pack<typename T::Out, 2>;
    if constexpr (T::kParts == 1) {
      finish(to, size, tile, [](const Pair(&sums)[1]) { return sums[0]; });
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

// A turn of the inner loop is the last three steps of one stage and the first five of the next. It
// is cut there because the compiler moves loads within a turn only, and to just before their step
// where that is in another one.
template <class T>
__device__ void multiply_tiles(const Target<typename T::Out>& to, Ring<T> ring, const Sizes& size) {
  const int lane = threadIdx.x % 32, stages = size.k / kStageColumns;
  WarpTile<T> part(threadIdx.x / 32, lane);
  typename WarpTile<T>::Operands even, odd;  // boxes
  bool ready = false;
  const auto load_even = [&] {
    if (!ready) barrier_wait(ring.full(), ring.parity);
    __syncwarp();
    part.load(even, ring.at(), 0);
  };
  const auto first_steps = [&] {
    const uint32_t stage = ring.at();
    ring.advance();
    // Asked early, the next stage's barrier costs the chain nothing.
    ready = barrier_is_done(ring.full(), ring.parity);
    part.template multiply<0, 1>(even);
    part.load(odd, stage, 1);
    part.template multiply<1, 4>(even);
    part.template multiply<0, 1>(odd);
  };
  const auto release = [&](uint32_t empty) {
    __syncwarp();  // all lanes have used what they read
    if (lane == 0) barrier_arrive(empty);
  };
  for (int tile = blockIdx.x; tile < size.tiles; tile += gridDim.x) {
    uint32_t empty = ring.empty();
    load_even();
    first_steps();
    for (int i = 1; i < stages; ++i) {
      const uint32_t next = ring.empty();
      load_even();
      part.template multiply<1, 4>(odd);
      release(empty);
      empty = next;
      first_steps();
    }
    part.template multiply<1, 4>(odd);
    release(empty);
    part.finish(to, size, tile);
  }
}

template <class T>
__global__ void __launch_bounds__(T::kThreads)
    skinny_kernel(const Target<typename T::Out> to, const __grid_constant__ CUtensorMap x,
                  const __grid_constant__ CUtensorMap w, const Sizes size) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ char shared[];
  const int warp = threadIdx.x / 32, thread = threadIdx.x;
  Ring<T> ring{.base = (shared_address(shared) + 1023) / 1024 * 1024};
  if (thread < T::kStages) {
    ring.stage = thread;
    barrier_init(ring.full(), 2);
    barrier_init(ring.empty(), T::kConsumers);
    ring.stage = 0;
  }
  const bool is_w = warp == T::kConsumers, is_x = warp == T::kConsumers + 1;
  if ((is_w || is_x) && thread % 32 == 0) tma_prefetch(is_w ? &w : &x);
  __syncthreads();
  let_next_start();
  if (!is_w || !size.reads_early) wait_for_previous();
  if (!is_w && !is_x)
    multiply_tiles<T>(to, ring, size);
  else if (thread % 32 == 0)
    copy_pieces<T>(is_w ? &w : &x, is_w, ring, size);
#endif
}

// Describes t[parts rows, cols] to the copy engine as [cols / 64, parts, rows, 64], of which a
// stage takes [2, parts, box_rows, 64].
CUtensorMap describe(const Tensor& t, int parts, int box_rows) {
  const auto rows = static_cast<cuuint64_t>(t.rows() / parts),
             cols = static_cast<cuuint64_t>(t.cols());
  return tma_describe(
      {.t = t,
       .sizes = {kBox, rows, static_cast<cuuint64_t>(parts), cols / kBox},
       .strides = {cols * sizeof(Bf16), rows * cols * sizeof(Bf16), kRowBytes},
       .box = {kBox, static_cast<cuuint32_t>(box_rows), static_cast<cuuint32_t>(parts), 2}});
}

// `op` is for tiles of two parts.
template <class T>
void run(const SkinnyProduct& args, Activation op = {}) {
  Sizes size{.m = static_cast<int>(args.x.rows()),
             .n = static_cast<int>(args.y.cols()),
             .k = static_cast<int>(args.x.cols()),
             .reads_early = EarlyReads::are_allowed()};
  size.shift = size.m > T::kTokens ? 1 : 0;
  size.tiles = ((size.n + T::kPartRows - 1) / T::kPartRows) << size.shift;
  const Device device = args.x.device();
  int multiprocessors = 0;
  COHORT_CUDA_CHECK(
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device.index));
  const int blocks = std::min(size.tiles, multiprocessors * T::kBlocksPerSm);
  launch("skinny_product", skinny_kernel<T>,
         {.grid = static_cast<unsigned>(blocks),
          .block = T::kThreads,
          .shared_bytes = T::kShared,
          .start = Start::kBesidePrevious},
         device,
         Target<typename T::Out>{pointer<typename T::Out>(args.y), pointer<Bf16>(args.bias), op},
         describe(args.x, 1, T::kTokens), describe(args.w, T::kParts, T::kPartRows), size);
}

// Numbers of rows of w, measured on an H200 (132 multiprocessors): up to kFew, tiles of 16 give
// every multiprocessor at most one; from kMany on, tiles of 80 are enough for all of them, so that
// x is copied to few blocks.
constexpr int64_t kFew = 132 * 16, kMany = 132 * 40;

// Whether this is faster than cuBLASLt. It is not where two tiles of tokens would share a
// multiprocessor for a long sum, and not between the two numbers.
bool is_faster(const SkinnySize& size) {
  const auto& [m, n, k] = size;
  if (n > kFew && n < kMany) return m <= 16;
  return m <= 32 || n <= kFew / 2 || n >= kMany || k <= 4096;
}

// Rings are so large that a multiprocessor has room for one block, where that is enough for all
// tiles: those of the next product, which start early, would gather on some of them.
template <class Out>
void dispatch(const SkinnyProduct& args) {
  const int64_t m = args.x.rows(), n = args.w.rows();
  if (n <= kFew) {
    if (m <= 16) return run<Tiling<Out, 16, 16, 16, 8, 14>>(args);
    if (m <= 32 || n <= kFew / 2) return run<Tiling<Out, 32, 16, 16, 16, 10>>(args);
    return run<Tiling<Out, 32, 16, 16, 16, 8>>(args);
  }
  if (n < kMany) return run<Tiling<Out, 16, 40, 16, 8, 8>>(args);
  if (m <= 16) return run<Tiling<Out, 16, 80, 16, 16, 5>>(args);
  if (m <= 32) return run<Tiling<Out, 32, 80, 32, 16, 4>>(args);
  return run<Tiling<Out, 64, 80, 32, 40, 4>>(args);
}

}  // namespace

bool is_skinny(const SkinnySize& size, Device device) {
  const auto& [m, n, k] = size;
  return m > 0 && m <= kSkinnyRows && k > 0 && k % kStageColumns == 0 && n % 8 == 0 &&
         std::max(n, k) < (int64_t{1} << 30) && is_faster(size) &&
         ::cohort::cuda::is_for_hopper(
             reinterpret_cast<const void*>(skinny_kernel<Tiling<Bf16, 16, 16, 16, 8, 14>>), device);
}

void skinny_product(const SkinnyProduct& args) {
  COHORT_CHECK(is_skinny({args.x.rows(), args.w.rows(), args.x.cols()}, args.x.device()),
               "[skinny] does not take ", args.x.str(), " times ", args.w.str());
  if (args.y.dtype() == DType::kF32)
    dispatch<float>(args);
  else
    dispatch<Bf16>(args);
}

bool is_gated_skinny(const SkinnySize& size, Device device) {
  return size.n >= kMany && is_skinny(size, device);
}

void gated_skinny_product(const SkinnyProduct& args, Activation op) {
  const int64_t m = args.x.rows();
  COHORT_CHECK(is_gated_skinny({m, args.w.rows(), args.x.cols()}, args.x.device()),
               "[skinny] does not take ", args.x.str(), " times ", args.w.str(), " gated");
  if (m <= 16) return run<Tiling<Bf16, 16, 80, 16, 16, 5, 2>>(args, op);
  if (m <= 32) return run<Tiling<Bf16, 32, 80, 32, 16, 4, 2>>(args, op);
  // A warp of few rows of w would read x, which all of them need, more often than shared memory
  // gives it: two warps have 24 rows of each part and two 16 (and 8 for nothing).
  run<Tiling<Bf16, 64, 80, 32, 48, 4, 2>>(args, op);
}

}  // namespace cohort::kernels::cuda
