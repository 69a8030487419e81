// dh = dy (s B) and dB = s dy^T h of LoRA's adapters in bf16 with one read of dy, which limits them
// (sm_90).
//
// A block has a strip of columns of one module and a range of rows. TMA loads dy in boxes of 128
// rows and 64 columns into a pipeline in shared memory, tile of rows by tile of rows, where each
// box is used twice: warp w multiplies rows 16 w to 16 w + 15 by the block of s B, which stays in
// shared memory; and a warp multiplies the transpose of 16 columns by the tile of h, warps 0 to 3
// those of even boxes and warps 4 to 7 those of odd ones. The sums of dh are complete after the
// boxes of a tile, those of dB after all tiles. Both are written as f32 partial sums, which a
// second kernel adds in ascending order of the strips or ranges.
#include "kernels/lora.h"

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/raw.cuh"
#include "kernels/cuda/sm90/pipeline.cuh"

namespace cohort::kernels::cuda {
namespace {

constexpr int kBox = LoraBlocks::kBoxColumns, kTileRows = LoraBlocks::kTileRows;
constexpr int kWarps = kTileRows / 16, kThreads = 32 * kWarps, kMaxBoxes = LoraBlocks::kMaxBoxes;
constexpr int kBoxRowBytes = 128, kBoxBytes = kTileRows * kBoxRowBytes;
constexpr int kMaxModules = 4, kMaxRank = 64, kAddThreads = 256;

struct Module {
  int row, rows;            // in the layer
  int db_row;               // the first of its rows of dB
  int first_strip, strips;  // strip k begins with box k boxes / strips
  int boxes;
};
struct Problem {
  const bf16* sb;
  float *dh, *db;  // partial sums
  int64_t sb_stride;
  int rows, rank, db_rows, strips, ranges;
  int tiles, range_tiles;
  int module_count;
  Module modules[kMaxModules];
};
struct Maps {
  CUtensorMap dy[kMaxModules], h;  // those of dy end with the module
};

// For ranks up to kColumns.
template <int kColumns>
struct Tile {
  static constexpr int kTiles = kColumns / 8;  // each of the columns of an instruction
  // A wide tile leaves h in shared memory, in rows with the 128-byte swizzle. In others, with the
  // 64-byte swizzle, a warp keeps its operands of h in registers while it computes a tile.
  static constexpr bool kIsWide = kColumns > 32;
  static constexpr int kHRowBytes = kIsWide ? 128 : 64, kHBytes = kTileRows * kHRowBytes;
  // A row of s B, an odd number of 16 bytes, so that there are no bank conflicts.
  static constexpr int kBRowBytes = 2 * kColumns + 16, kBBytes = kMaxBoxes * kBox * kBRowBytes;
  static constexpr int kHStages = 2, kBarrierBytes = 256;
  static constexpr int kStages =
      ((227 << 10) - kHStages * kHBytes - kBBytes - kBarrierBytes) / kBoxBytes;
  static constexpr int kHOffset = kStages * kBoxBytes, kBOffset = kHOffset + kHStages * kHBytes;
  static constexpr int kBarrierOffset = kBOffset + kBBytes;
  static constexpr int kShared = kBarrierOffset + kBarrierBytes;
  static_assert(Pipeline<kStages>::kBytes + Pipeline<kHStages>::kBytes <= kBarrierBytes);

  using Sums = float[kTiles][4];
  using Operand = uint32_t[kTiles / 2][4];

  // The operand of 16 rows of h or s B; row(r): the shared address of chunk c of row r.
  template <class Address>
  static __device__ __forceinline__ void load(Operand& b, const Address& address) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < kTiles / 2; ++j)
      load_matrices_transposed(b[j], address(lane % 16, 2 * j + lane / 16));
  }
  static __device__ __forceinline__ void multiply(Sums& sums, const uint32_t (&a)[4],
                                                  const Operand& b) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
      mma_bf16(sums[j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
  }
  // Stores 16 rows of sums to `to`, of which `rows` exist.
  static __device__ __forceinline__ void store(const Sums& sums, float* to, int rows, int rank) {
    const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (8 * j < rank && row + 8 * half < rows)
          store_pack(to + int64_t{row + 8 * half} * rank + 8 * j + column,
                     Pack<float, 2>{sums[j][2 * half], sums[j][2 * half + 1]});
  }
};

// The part of a block: box i has columns of box i % boxes of the strip, rows of tile i / boxes.
template <class Tile>
struct Strip {
  const Problem& problem;
  const Maps& maps;
  uint32_t memory;  // shared address
  int module = 0, first_box, boxes, first_tile, tiles;
  Pipeline<Tile::kStages> pipeline{memory + Tile::kBarrierOffset};
  Pipeline<Tile::kHStages> h_pipeline{pipeline.end()};

  __device__ __forceinline__ Strip(const Problem& problem, const Maps& maps, uint32_t memory)
      : problem(problem), maps(maps), memory(memory) {
    const int strip = static_cast<int>(blockIdx.x);
    while (module + 1 < problem.module_count && strip >= problem.modules[module + 1].first_strip)
      ++module;
    const auto first_of = [&](int k) { return k * of().boxes / of().strips; };
    first_box = first_of(strip - of().first_strip);
    boxes = first_of(strip - of().first_strip + 1) - first_box;
    first_tile = static_cast<int>(blockIdx.y) * problem.range_tiles;
    tiles = min(problem.range_tiles, problem.tiles - first_tile);
  }
  __device__ const Module& of() const { return problem.modules[module]; }
  __device__ int count() const { return boxes * tiles; }

  // One thread calls these.
  __device__ __forceinline__ void load_box(int i) const {
    const PipelineState<Tile::kStages> state(i);
    pipeline.producer_commit_expect_tx(state, kBoxBytes);
    tma_load(memory + state.index * kBoxBytes, &maps.dy[module],
             {{(first_box + i % boxes) * kBox, (first_tile + i / boxes) * kTileRows, 0, 0}},
             pipeline.full(state.index));
  }
  __device__ __forceinline__ void load_h(int tile) const {
    const PipelineState<Tile::kHStages> state(tile);
    h_pipeline.producer_commit_expect_tx(state, Tile::kHBytes);
    tma_load(memory + Tile::kHOffset + state.index * Tile::kHBytes, &maps.h,
             {{module * problem.rank, (first_tile + tile) * kTileRows, 0, 0}},
             h_pipeline.full(state.index));
  }
  // After box i: loads the box that replaces the one before it, which the other warps have probably
  // read.
  __device__ __forceinline__ void load_after(int i) const {
    const int next = i - 1 + Tile::kStages;
    if (i == 0 || next >= count()) return;
    pipeline.producer_acquire(next);
    load_box(next);
  }
  // Before a tile: loads the next h to the place of the previous one.
  __device__ __forceinline__ void load_next_h(int tile) const {
    if (tile == 0 || tile + 1 >= tiles) return;
    h_pipeline.producer_acquire(tile + 1);
    load_h(tile + 1);
  }
  __device__ __forceinline__ void load_first() const {
    for (int tile = 0; tile < min(tiles, Tile::kHStages); ++tile) load_h(tile);
    for (int i = 0; i < min(count(), Tile::kStages); ++i) load_box(i);
  }
  // All threads copy the rows of s B; zeros past the module and the rank.
  __device__ __forceinline__ void load_b() const {
    for (int i = threadIdx.x; i < boxes * kBox * Tile::kTiles; i += kThreads) {
      const int row = i / Tile::kTiles, chunk = i % Tile::kTiles,
                in_module = first_box * kBox + row;
      const bool exists = in_module < of().rows && 8 * chunk < problem.rank;
      const bf16* from = problem.sb + module * problem.rank +
                         (of().row + in_module) * problem.sb_stride + 8 * chunk;
      copy_async(memory + Tile::kBOffset + row * Tile::kBRowBytes + 16 * chunk,
                 exists ? from : problem.sb, exists ? 16 : 0);
    }
    copy_async_commit();
    copy_async_wait<0>();
  }

  // Adds a box to the sums of the warp's rows; b: shared address of the box's rows of s B.
  __device__ __forceinline__ void add_dh(typename Tile::Sums& sums, uint32_t box,
                                         uint32_t b) const {
    const int lane = threadIdx.x % 32, row = static_cast<int>(threadIdx.x) / 32 * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < kBox / 16; ++step) {
      uint32_t left[4];
      typename Tile::Operand right;
      load_matrices(left, box + row * kBoxRowBytes + (((2 * step + lane / 16) ^ row) & 7) * 16);
      Tile::load(right, [&](int r, int chunk) {
        return b + (16 * step + r) * Tile::kBRowBytes + 16 * chunk;
      });
      Tile::multiply(sums, left, right);
    }
  }
  __device__ __forceinline__ void load_h_operand(typename Tile::Operand& operand, int tile,
                                                 int step) const {
    constexpr int kRowBytes = Tile::kHRowBytes, kChunks = kRowBytes / 16;
    const uint32_t h = memory + Tile::kHOffset + tile % Tile::kHStages * Tile::kHBytes;
    Tile::load(operand, [&](int r, int chunk) {
      const int row = 16 * step + r;
      return h + row * kRowBytes + ((chunk ^ row * kRowBytes / 128) & (kChunks - 1)) * 16;
    });
  }
  // Adds a box to the sums of the warp's columns.
  template <class LoadH>
  __device__ __forceinline__ void add_db(typename Tile::Sums& sums, uint32_t box,
                                         const LoadH& load_h) const {
    const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int chunk = warp % 4 * 2 + lane / 8 % 2;
#pragma unroll
    for (int step = 0; step < kTileRows / 16; ++step) {
      const int row = 16 * step + lane / 16 * 8 + lane % 8;
      uint32_t left[4];
      load_matrices_transposed(left, box + row * kBoxRowBytes + ((chunk ^ row) & 7) * 16);
      load_h(step, [&](const typename Tile::Operand& right) { Tile::multiply(sums, left, right); });
    }
  }

  // Adds the boxes of a tile, the first of which is box i.
  __device__ __forceinline__ void add_tile(typename Tile::Sums (&db)[kMaxBoxes / 2], int tile,
                                           int i) const {
    constexpr int kSteps = Tile::kIsWide ? 1 : kTileRows / 16;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    typename Tile::Operand h[kSteps];
    typename Tile::Sums dh = {};
    if (threadIdx.x == 0) load_next_h(tile);
    __syncwarp();
    h_pipeline.consumer_wait(tile);
    if constexpr (!Tile::kIsWide) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) load_h_operand(h[step], tile, step);
      h_pipeline.consumer_release_fenced(tile);
    }
#pragma unroll
    for (int c = 0; c < kMaxBoxes; ++c, ++i) {
      if (c >= boxes) break;
      const PipelineState<Tile::kStages> state(i);
      const uint32_t box = memory + state.index * kBoxBytes;
      pipeline.consumer_wait(state);
      add_dh(dh, box, memory + Tile::kBOffset + c * kBox * Tile::kBRowBytes);
      if (warp / 4 == c % 2)
        add_db(db[c / 2], box, [&](int step, const auto& multiply) {
          if constexpr (Tile::kIsWide) load_h_operand(h[0], tile, step);
          multiply(h[Tile::kIsWide ? 0 : step]);
        });
      pipeline.consumer_release_fenced(state);
      if (threadIdx.x == 0) load_after(i);
      __syncwarp();
    }
    if constexpr (Tile::kIsWide) h_pipeline.consumer_release_fenced(tile);
    const int row = (first_tile + tile) * kTileRows + 16 * warp, rank = problem.rank;
    Tile::store(dh, problem.dh + (int64_t{blockIdx.x} * problem.rows + row) * rank,
                problem.rows - row, rank);
  }
};

template <class Tile>
__global__ void __launch_bounds__(kThreads, 1)
    lora_backward_kernel(const __grid_constant__ Problem problem,
                         const __grid_constant__ Maps maps) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
  // sm_120 has less shared memory than a block needs.
  extern __shared__ __align__(1024) char tile_memory[];
  const Strip<Tile> strip(problem, maps, shared_address(tile_memory));
  if (threadIdx.x == 0) {
    tma_prefetch(&maps.dy[strip.module]);
    tma_prefetch(&maps.h);
    strip.pipeline.init(1, kWarps);
    strip.h_pipeline.init(1, kWarps);
  }
  launch_dependents_and_wait();
  if (threadIdx.x == 0) strip.load_first();
  strip.load_b();
  __syncthreads();
  typename Tile::Sums db[kMaxBoxes / 2] = {};
#pragma unroll 1
  for (int tile = 0; tile < strip.tiles; ++tile) strip.add_tile(db, tile, tile * strip.boxes);
  const int warp = static_cast<int>(threadIdx.x) / 32, rank = problem.rank;
#pragma unroll
  for (int pair = 0; pair < kMaxBoxes / 2; ++pair) {
    const int c = 2 * pair + warp / 4, row = (strip.first_box + c) * kBox + warp % 4 * 16;
    if (c >= strip.boxes) break;
    Tile::store(
        db[pair],
        problem.db + (int64_t{blockIdx.y} * problem.db_rows + strip.of().db_row + row) * rank,
        strip.of().rows - row, rank);
  }
#endif
}

struct Outputs {
  bf16* dh;
  float* db;
  int columns;  // P
  float scale;
  bool accumulate;
};

// The sum of a pair of elements of `count` matrices of `size` elements.
__device__ __forceinline__ float2 add_in_order(const float* partials, int64_t size, int count) {
  float2 total = {};
#pragma unroll 8
  for (int k = 0; k < count; ++k) {
    const auto values = load_pack<2>(partials + k * size);
    total.x += values.v[0];
    total.y += values.v[1];
  }
  return total;
}

// A thread adds the partial sums of two adjacent elements, first of dB, then of dh.
__global__ void __launch_bounds__(kAddThreads)
    add_lora_partials_kernel(const __grid_constant__ Problem problem, const Outputs out) {
  launch_dependents_and_wait();
  const int rank = problem.rank, db_size = problem.db_rows * rank;
  int i = 2 * (static_cast<int>(blockIdx.x) * kAddThreads + static_cast<int>(threadIdx.x));
  if (i < db_size) {
    const float2 total = add_in_order(problem.db + i, db_size, problem.ranges);
    Pack<float, 2> old = {};
    if (out.accumulate) old = load_pack<2>(out.db + i);
    store_pack(out.db + i,
               Pack<float, 2>{out.scale * total.x + old.v[0], out.scale * total.y + old.v[1]});
    return;
  }
  i -= db_size;
  const int row = i / out.columns, column = i % out.columns, m = column / rank;
  if (row >= problem.rows) return;
  float2 total = {};
  if (m < problem.module_count) {
    const int64_t size = int64_t{problem.rows} * rank;
    const Module& module = problem.modules[m];
    total =
        add_in_order(problem.dh + module.first_strip * size + int64_t{row} * rank + column % rank,
                     size, module.strips);
  }
  store_raw(out.dh + i, Raw<bf16, 2>{pack_bf16(total.x, total.y)});
}

// Boxes of 128 rows and `columns` columns.
CUtensorMap map_of(const Tensor& t, int columns) {
  const auto rows = static_cast<cuuint64_t>(t.dim(0));
  const cuuint64_t row_bytes = static_cast<cuuint64_t>(RowOffsets(t).outer) * sizeof(bf16);
  return make_tensor_map({.t = t,
                          .sizes = {static_cast<cuuint64_t>(t.dim(1)), rows, 1, 1},
                          .strides = {row_bytes, row_bytes * rows, row_bytes * rows},
                          .box = {static_cast<cuuint32_t>(columns), kTileRows, 1, 1}});
}

template <int kColumns>
void run(const LoraOutputGradients& args, const Problem& problem) {
  using RankTile = Tile<kColumns>;
  Maps maps{};
  for (int m = 0; m < kMaxModules; ++m) {
    const AdapterSlice& module =
        args.modules[static_cast<size_t>(std::min(m, problem.module_count - 1))];
    maps.dy[m] = map_of(args.dy.narrow(1, module.row, module.rows), kBox);
  }
  maps.h = map_of(args.h, RankTile::kHRowBytes / int{sizeof(bf16)});
  launch(
      "lora_backward", lora_backward_kernel<RankTile>,
      {.grid = dim3(static_cast<unsigned>(problem.strips), static_cast<unsigned>(problem.ranges)),
       .block = kThreads,
       .shared_bytes = RankTile::kShared,
       .start = Start::kProgrammatic},
      args.dy.device(), problem, maps);
}

Problem problem_of(const LoraOutputGradients& args, const LoraBlocks& blocks) {
  Tensor dh = blocks.dh, db = blocks.db;
  Problem problem{.sb = pointer<bf16>(args.sb),
                  .dh = pointer<float>(dh),
                  .db = pointer<float>(db),
                  .sb_stride = RowOffsets(args.sb).outer,
                  .rows = static_cast<int>(args.dy.dim(0)),
                  .rank = static_cast<int>(args.db.tensor.cols()),
                  .db_rows = static_cast<int>(args.db.tensor.dim(0)),
                  .strips = static_cast<int>(blocks.strips),
                  .ranges = static_cast<int>(blocks.ranges),
                  .tiles = static_cast<int>(blocks_for(args.dy.dim(0), kTileRows)),
                  .range_tiles = static_cast<int>(blocks.tiles)};
  int strip = 0, row = 0;
  for (const AdapterSlice& from : args.modules) {
    Module& to = problem.modules[problem.module_count++];
    const auto boxes = static_cast<int>(blocks_for(from.rows, kBox));
    to = {.row = static_cast<int>(from.row),
          .rows = static_cast<int>(from.rows),
          .db_row = row,
          .first_strip = strip,
          .strips = static_cast<int>(blocks_for(boxes, blocks.boxes)),
          .boxes = boxes};
    strip += to.strips;
    row += to.rows;
  }
  return problem;
}

}  // namespace

bool has_lora_kernel(const LoraOutputGradients& args) {
  const auto& [dh, db, dy, h, sb, modules, scale] = args;
  constexpr int kPack = kPackSize<bf16>;
  constexpr int64_t kMaxElements = 1 << 30;
  if (!db.wanted() || dy.dtype() != DType::kBF16 || dh.numel() == 0) return false;
  const int64_t rank = db.tensor.cols();
  const auto has_aligned_rows = [](const Tensor& t) {
    return RowOffsets(t).outer % kPack == 0 && aligned(static_cast<const char*>(t.raw()));
  };
  for (const AdapterSlice& module : modules)
    if (module.row % kPack != 0) return false;
  return has_aligned_rows(dh) && has_aligned_rows(dy) && has_aligned_rows(h) &&
         has_aligned_rows(sb) && has_aligned_rows(db.tensor) && rank % 8 == 0 && rank > 0 &&
         rank <= kMaxRank && !modules.empty() && modules.size() <= kMaxModules &&
         dh.numel() + db.tensor.numel() < kMaxElements &&
         ::cohort::cuda::fits(reinterpret_cast<const void*>(lora_backward_kernel<Tile<kMaxRank>>),
                              {.shared_memory = Tile<kMaxRank>::kShared, .compute_capability = 90},
                              dy.device());
}

void lora_output_gradients(const LoraOutputGradients& args, const LoraBlocks& blocks) {
  const Problem problem = problem_of(args, blocks);
  if (problem.rank <= 16)
    run<16>(args, problem);
  else if (problem.rank <= 32)
    run<32>(args, problem);
  else
    run<kMaxRank>(args, problem);
  Tensor dh = args.dh, db = args.db.tensor;
  launch("lora_backward", add_lora_partials_kernel,
         {.grid = blocks_for((dh.numel() + db.numel()) / 2, kAddThreads),
          .block = kAddThreads,
          .start = Start::kProgrammatic},
         dh.device(), problem,
         Outputs{.dh = pointer<bf16>(dh),
                 .db = pointer<float>(db),
                 .columns = static_cast<int>(dh.dim(1)),
                 .scale = static_cast<float>(args.scale),
                 .accumulate = args.db.mode == Grad::kAccumulate});
}

}  // namespace cohort::kernels::cuda
