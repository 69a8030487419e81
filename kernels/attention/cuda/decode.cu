// attention_paged() in bf16 for single tokens on sm_90: decoding. A step is bound by reading keys
// and values where there are many sequences, and by how long one takes where there are few.
//
// A block has one token and the query heads that share a key head, up to 16 rows, and goes over the
// tiles of keys of its chunks. All warps share the rows: each computes S and P for a share of the
// tile's keys and O for a share of the head dim. Between them go round, in shared memory, the row
// max, P in f32 (for l, whose order is that of one thread that sees all keys) and P in bf16 (for P
// V). Several tiles are on their way at a time; the table's entries for the next one are fetched a
// tile earlier.
//
// Where there are fewer blocks than the device can run, those of a cluster share the rows' chunks:
// block b takes chunks b, b + size, ... of those that the rows see. After each round every block
// joins a share of O's elements, reading the chunks' in ascending order from the shared memory of
// the others; one chunk of one block is the same with nothing to wait for.
#include "kernels/attention/cuda/attend.cuh"
#include "kernels/attention/cuda/cluster.cuh"
#include "kernels/attention/cuda/paged.cuh"

namespace cohort::kernels::cuda {
namespace {

using Bf16 = __nv_bfloat16;

struct DecodeProblem {
  const Bf16 *q, *k, *v;
  Bf16* o;
  const int32_t *sequences, *positions;
  PageTable table;
  int64_t q_stride;
  int heads, kv_heads;
  int parts;  // blocks that the heads of a group need
  AttendParams params;
};

template <int kDim_, int kStages_>
struct DecodeShape {
  static constexpr int kDim = kDim_, kStages = kStages_;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kRows = 16;
  static constexpr int kKeys = kTileKeys<kDim>, kGroups = kKeys / 16;
  static constexpr int kChunkTiles = kAttentionChunk / kKeys;
  // A warp's share of the tile's groups of 16 keys, of its rows to load, and of the head dim.
  static constexpr int kOwnGroups = kGroups / kWarps, kOwnKeys = 16 * kOwnGroups;
  static constexpr int kOwnColumns = kDim / kWarps;
  static constexpr int kTileBytes = 2 * kKeys * kDim;
  // P takes the place of the tile's keys: in f32, rows off the multiples of 32 banks, then in bf16.
  static constexpr int kScoreStride = kKeys + 8, kScoreBytes = 4 * kRows * kScoreStride;
  static_assert(kScoreBytes + 2 * kRows * kKeys <= kTileBytes);
  // Elements of O that a thread joins and writes, in packs of 4, if its block is alone.
  static constexpr int kPacks = kRows * kDim / 4 / kThreads;
  // After the stages of keys and values: the queries, O of a chunk, its states, the row max of each
  // warp's keys, alpha.
  static constexpr int kQueries = 2 * kStages * kTileBytes;
  static constexpr int kOutputs = kQueries + 2 * kRows * kDim;
  static constexpr int kStates = kOutputs + 4 * kRows * kDim;
  static constexpr int kMaxima = kStates + kRows * int{sizeof(ChunkState)};
  static constexpr int kAlphas = kMaxima + 4 * kWarps * kRows;
  static constexpr size_t kSharedBytes = kAlphas + 4 * kRows;
};

// The block's rows, and the tiles that its keys lie in.
struct DecodeRows {
  const Bf16 *q, *k, *v;
  Bf16* o;
  const int32_t* blocks;  // the sequence's row of the table; null: the token is idle
  int count, head_dim;    // rows, and their length
  int visible;            // they see the window's last of keys 0 .. visible - 1
  int first_tile, tiles;

  __device__ DecodeRows(const DecodeProblem& p, int keys_per_tile) {
    const int64_t token = blockIdx.x;
    const int kv_head = static_cast<int>(blockIdx.y) / p.parts, group = p.heads / p.kv_heads;
    const int in_group = static_cast<int>(blockIdx.y) % p.parts * 16;
    const int head = kv_head * group + in_group;
    const int64_t dim = head_dim = p.params.head_dim;
    const int position = p.positions[token], sequence = p.sequences[token];
    q = p.q + token * p.q_stride + head * dim;
    k = p.k + kv_head * dim;
    v = p.v + kv_head * dim;
    o = p.o + (token * p.heads + head) * dim;
    blocks = position >= 0 && p.table.has(sequence) ? p.table.row(sequence) : nullptr;
    count = min(16, group - in_group);
    visible = p.table.keys_of(position);
    first_tile = max(0, visible - p.params.window) / keys_per_tile;
    tiles = (visible + keys_per_tile - 1) / keys_per_tile;
  }
  __device__ const Bf16* query(int r) const { return r < count ? q + r * head_dim : nullptr; }
};

// Loads the block's tiles one after the other. A lane knows where one row of the next tile lies.
template <class Shape>
class TileLoader {
 public:
  __device__ TileLoader(const DecodeProblem& problem, const DecodeRows& rows, int tile, int step)
      : problem_(problem), rows_(rows), tile_(tile), step_(step) {
    find();
  }
  // Begins to load the next tile, if there is one, as two groups of copies: keys and values.
  __device__ void load(uint32_t keys, uint32_t values) {
    const bool more = tile_ < rows_.tiles;
    const int64_t offset = offset_;
    tile_ = next_tile(tile_);
    find();
    if (more) copy(keys, rows_.k, offset);
    copy_async_commit();
    if (more) copy(values, rows_.v, offset);
    copy_async_commit();
  }
  // The block's tile after this one: the next in its chunk, or the first of the block's next chunk.
  __device__ int next_tile(int tile) const {
    return (tile + 1) % Shape::kChunkTiles == 0 ? tile + 1 + (step_ - 1) * Shape::kChunkTiles
                                                : tile + 1;
  }

 private:
  __device__ void find() {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int key = tile_ * Shape::kKeys + static_cast<int>(threadIdx.x / 32) * Shape::kOwnKeys +
                    lane % Shape::kOwnKeys;
    const int64_t slot = key < rows_.visible ? problem_.table.slot(rows_.blocks, key) : int64_t{-1};
    offset_ = slot < 0 ? -1 : slot * problem_.kv_heads * problem_.params.head_dim;
  }
  __device__ void copy(uint32_t to, const Bf16* from, int64_t offset) const {
    constexpr int kChunks = Shape::kDim / 8;
    const int lane = static_cast<int>(threadIdx.x % 32), chunk = lane % kChunks;
    const int first = static_cast<int>(threadIdx.x / 32) * Shape::kOwnKeys;
    const AttendParams& params = problem_.params;
#pragma unroll
    for (int i = 0; i < Shape::kOwnKeys; i += 32 / kChunks) {
      const int row = i + lane / kChunks;
      const int64_t at = __shfl_sync(0xffffffffu, offset, row);
      const bool live = at >= 0 && 8 * chunk < params.head_dim;
      if (params.vectorized)
        copy_async(to + chunk_offset<Shape::kDim>(first + row, chunk),
                   live ? from + at + 8 * chunk : nullptr, live ? 16 : 0);
      else
        load_chunk<Shape::kDim>(to, first + row, chunk, at < 0 ? nullptr : from + at,
                                params.head_dim, false);
    }
  }

  const DecodeProblem& problem_;
  const DecodeRows& rows_;
  int tile_, step_;
  int64_t offset_;  // of the lane's row of tile_, from k and v; negative: zeros
};

// What a warp computes of a chunk: rows `group` and `group` + 8 of O, its columns; l of four rows
// in its parts, lane % 16 = 4 row + part.
template <class Shape>
struct DecodeWarp {
  float row_max_log2[2], l, o[Shape::kOwnColumns / 8][4];
  char* shared;
  int warp, group, quad;
  int sum_row, part;  // of l

  __device__ explicit DecodeWarp(char* memory)
      : shared(memory),
        warp(static_cast<int>(threadIdx.x / 32)),
        group(static_cast<int>(threadIdx.x % 32 / 4)),
        quad(static_cast<int>(threadIdx.x % 4)),
        sum_row(4 * warp + static_cast<int>(threadIdx.x % 16 / 4)),
        part(static_cast<int>(threadIdx.x % 4)) {
    start();
  }
  __device__ float* floats(int offset) const { return reinterpret_cast<float*>(shared + offset); }

  __device__ void start() {
    row_max_log2[0] = row_max_log2[1] = -INFINITY;
    l = 0;
#pragma unroll
    for (auto& n : o)
#pragma unroll
      for (float& x : n) x = 0;
  }

  // S of the warp's keys, masked, and its row max for the others. key0: the tile's first key.
  __device__ void scores(float (&s)[2 * Shape::kOwnGroups][4], uint32_t keys, int key0,
                         const DecodeRows& rows, const AttendParams& params) {
    const int first = warp * Shape::kOwnKeys, seen = rows.visible - key0;
    score_step<Shape::kDim, Shape::kOwnGroups, true>(s, shared_address(shared) + Shape::kQueries, 0,
                                                     keys, first,
                                                     (seen + 15) / 16 - warp * Shape::kOwnGroups);
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < 2 * Shape::kOwnGroups; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = first + 8 * n + 2 * quad + e % 2;
        if (key >= seen || key < seen - params.window) s[n][e] = -INFINITY;
        largest[e / 2] = fmaxf(largest[e / 2], s[n][e]);
      }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = fmaxf(largest[r], __shfl_xor_sync(0xffffffffu, largest[r], 1));
      largest[r] = fmaxf(largest[r], __shfl_xor_sync(0xffffffffu, largest[r], 2));
      if (quad == 0) floats(Shape::kMaxima)[warp * Shape::kRows + group + 8 * r] = largest[r];
    }
  }

  // P of the warp's keys, to the place of the tile's keys; O is scaled.
  __device__ void probabilities(const float (&s)[2 * Shape::kOwnGroups][4], char* keys, float c) {
    float origin[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* const maxima = floats(Shape::kMaxima) + group + 8 * r;
      float largest = maxima[0];
#pragma unroll
      for (int w = 1; w < Shape::kWarps; ++w) largest = fmaxf(largest, maxima[w * Shape::kRows]);
      const float raised = fmaxf(row_max_log2[r], largest * c);
      origin[r] = raised == -INFINITY ? 0.0f : raised;  // as in softmax_step()
      const float alpha = fast_exp2(row_max_log2[r] - origin[r]);
      row_max_log2[r] = raised;
      if (warp == 0 && quad == 0) floats(Shape::kAlphas)[group + 8 * r] = alpha;
#pragma unroll
      for (auto& n : o) {
        n[2 * r] *= alpha;
        n[2 * r + 1] *= alpha;
      }
    }
    auto* const exact = reinterpret_cast<float*>(keys);
    const uint32_t rounded = shared_address(keys) + Shape::kScoreBytes;
#pragma unroll
    for (int n = 0; n < 2 * Shape::kOwnGroups; ++n)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = group + 8 * r, key = warp * Shape::kOwnKeys + 8 * n + 2 * quad;
        const Pack<float, 2> p{fast_exp2(__fmaf_rn(s[n][2 * r], c, -origin[r])),
                               fast_exp2(__fmaf_rn(s[n][2 * r + 1], c, -origin[r]))};
        store_pack(exact + row * Shape::kScoreStride + key, p);
        asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(
                         rounded + chunk_offset<Shape::kKeys>(row, key / 8) + 4 * quad),
                     "r"(pack_bf16(p.v[0], p.v[1]))
                     : "memory");
      }
  }

  // l and O go up by the tile's P. groups: of 16 keys that the rows see.
  __device__ void sums(const char* keys, uint32_t values, int groups) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const auto* const exact =
        reinterpret_cast<const float*>(keys) + sum_row * Shape::kScoreStride + 2 * part;
    const uint32_t rounded = shared_address(keys) + Shape::kScoreBytes;
    l *= floats(Shape::kAlphas)[sum_row];
#pragma unroll
    for (int g = 0; g < Shape::kGroups; ++g) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto pair = load_pack<2>(exact + 16 * g + 8 * half);
        l += pair.v[0];
        l += pair.v[1];
      }
      if (g >= groups) continue;
      uint32_t a[4];
      load_matrices(a, rounded + chunk_offset<Shape::kKeys>(lane % 16, 2 * g + lane / 16));
#pragma unroll
      for (int n = 0; n < Shape::kOwnColumns / 16; ++n) {
        uint32_t b[4];
        const int chunk = warp * Shape::kOwnColumns / 8 + 2 * n + lane / 16;
        load_matrices_transposed(b, values + chunk_offset<Shape::kDim>(16 * g + lane % 16, chunk));
        mma_bf16(o[2 * n], a, b[0], b[1]);
        mma_bf16(o[2 * n + 1], a, b[2], b[3]);
      }
    }
  }

  // Where pack `pack` of 4 columns of O's row lies: eights of columns are swapped around as in
  // JoinedChunks.
  static __device__ int place(int row, int pack) {
    return row * Shape::kDim + 8 * ((pack / 2) ^ (row & 7)) + 4 * (pack % 2);
  }
  // Puts the chunk where the cluster joins it, and starts the next.
  __device__ void finish() {
    const float even = l + __shfl_xor_sync(0xffffffffu, l, 1);
    const float sum = even + __shfl_xor_sync(0xffffffffu, even, 2);
    auto* const states = reinterpret_cast<ChunkState*>(shared + Shape::kStates);
    if (threadIdx.x % 32 < 16 && part == 0) states[sum_row].l = sum;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = group + 8 * r;
      if (warp == 0 && quad == 0) states[row].row_max_log2 = row_max_log2[r];
#pragma unroll
      for (int n = 0; n < Shape::kOwnColumns / 8; ++n)
        store_pack(floats(Shape::kOutputs) + place(row, (warp * Shape::kOwnColumns + 8 * n) / 4) +
                       2 * quad,
                   Pack<float, 2>{o[n][2 * r], o[n][2 * r + 1]});
    }
    start();
  }
};

// A thread's share of the rows' joined O: packs of 4 columns, block b of the cluster the packs p
// with p / kThreads % blocks = b.
template <class Shape>
struct JoinedShare {
  ChunkState states[Shape::kPacks];
  Pack<float, 4> o[Shape::kPacks];

  // Joins the chunk that block `from` has put in its shared memory; `first`: no chunk came before.
  __device__ void take(char* shared, int from, int blocks, bool first) {
#pragma unroll
    for (int i = 0; i < Shape::kPacks; ++i) {
      const int pack = pack_of(i, blocks), row = pack / (Shape::kDim / 4);
      if (row >= Shape::kRows) continue;
      const auto* const state_of =
          in_block(reinterpret_cast<const float*>(shared + Shape::kStates), from) + 2 * row;
      const auto pair = load_pack<2>(state_of);
      const ChunkState chunk{pair.v[0], pair.v[1]};
      const auto values =
          load_pack<4>(in_block(reinterpret_cast<const float*>(shared + Shape::kOutputs), from) +
                       DecodeWarp<Shape>::place(row, pack % (Shape::kDim / 4)));
      if (first) {
        states[i] = chunk;
        o[i] = values;
        continue;
      }
      const JoinFactors by = join_factors(states[i], chunk);
      states[i] = join(states[i], chunk, by);
#pragma unroll
      for (int e = 0; e < 4; ++e) o[i].v[e] = join(o[i].v[e], values.v[e], by);
    }
  }

  __device__ void store(const DecodeRows& rows, const AttendParams& params, int blocks) const {
#pragma unroll
    for (int i = 0; i < Shape::kPacks; ++i) {
      const int pack = pack_of(i, blocks), row = pack / (Shape::kDim / 4);
      const int column = 4 * (pack % (Shape::kDim / 4)), live = params.head_dim - column;
      if (row >= rows.count || live <= 0) continue;
      const float inverse = 1.0f / states[i].l;
      Pack<Bf16, 4> out;
#pragma unroll
      for (int e = 0; e < 4; ++e) out.v[e] = from_float<Bf16>(o[i].v[e] * inverse + 0.0f);
      Bf16* const to = rows.o + row * params.head_dim + column;
      if (params.vectorized) store_pack(to, out);
      if (!params.vectorized)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (e < live) to[e] = out.v[e];
    }
  }

 private:
  static __device__ int pack_of(int i, int blocks) {
    return (i * blocks + static_cast<int>(blockIdx.z)) * Shape::kThreads +
           static_cast<int>(threadIdx.x);
  }
};

// The tiles of one chunk, from `tile` on. Returns the block's next tile.
template <class Shape>
__device__ __forceinline__ int decode_chunk(DecodeWarp<Shape>& warp, TileLoader<Shape>& loader,
                                            const DecodeRows& rows, const AttendParams& params,
                                            int tile, int& stage) {
  constexpr uint32_t kTileBytes = Shape::kTileBytes;
  const int chunk = tile / Shape::kChunkTiles;
  const uint32_t base = shared_address(warp.shared);
  const auto keys_at = [&](int s) { return base + 2 * s * kTileBytes; };
#pragma unroll 1
  for (; tile < rows.tiles && tile / Shape::kChunkTiles == chunk; tile = loader.next_tile(tile)) {
    const int key0 = tile * Shape::kKeys;
    copy_async_wait<2 * Shape::kStages - 3>();  // the keys are there
    __syncthreads();
    const int free = stage == 0 ? Shape::kStages - 1 : stage - 1;
    loader.load(keys_at(free), keys_at(free) + kTileBytes);
    float s[2 * Shape::kOwnGroups][4];
    warp.scores(s, keys_at(stage), key0, rows, params);
    __syncthreads();
    char* const probabilities = warp.shared + 2 * stage * Shape::kTileBytes;
    warp.probabilities(s, probabilities, params.c);
    copy_async_wait<2 * Shape::kStages - 2>();  // and the values
    __syncthreads();
    warp.sums(probabilities, keys_at(stage) + kTileBytes,
              min(Shape::kGroups, (rows.visible - key0 + 15) / 16));
    stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
  }
  return tile;
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads)
    attention_decode_kernel(const __grid_constant__ DecodeProblem problem) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char shared[];
  start_beside_previous();
  const AttendParams& params = problem.params;
  const DecodeRows rows(problem, Shape::kKeys);
  const auto rank = static_cast<int>(blockIdx.z);
  if (rows.blocks == nullptr) {
    if (rank == 0)
      for (int i = static_cast<int>(threadIdx.x); i < rows.count * params.head_dim;
           i += Shape::kThreads)
        rows.o[i] = from_float<Bf16>(0.0f);
    return;
  }
  const int first_chunk = rows.first_tile / Shape::kChunkTiles;
  const int chunks = (rows.tiles - 1) / Shape::kChunkTiles + 1 - first_chunk;
  // One chunk needs no company.
  const int blocks = chunks > 1 ? static_cast<int>(gridDim.z) : 1;
  if (rank >= blocks) return;

  int tile = rank == 0 ? rows.first_tile : (first_chunk + rank) * Shape::kChunkTiles;
  TileLoader<Shape> loader(problem, rows, tile, blocks);
  load_queries<Shape>(rows, shared_address(shared) + Shape::kQueries, params);
  for (int stage = 0; stage + 1 < Shape::kStages; ++stage) {
    const uint32_t keys = shared_address(shared) + 2 * stage * Shape::kTileBytes;
    loader.load(keys, keys + Shape::kTileBytes);
  }
  DecodeWarp<Shape> warp(shared);
  JoinedShare<Shape> share;
  int stage = 0;
#pragma unroll 1
  for (int done = 0; done < chunks; done += blocks) {
    if (done + rank < chunks) {
      tile = decode_chunk(warp, loader, rows, params, tile, stage);
      warp.finish();
    }
    blocks > 1 ? cluster_sync() : __syncthreads();
    for (int from = 0; from < min(blocks, chunks - done); ++from)
      share.take(shared, from, blocks, done + from == 0);
    // The places are used again, and a block's memory is read until all are here.
    if (blocks > 1)
      cluster_sync();
    else if (done + 1 < chunks)
      __syncthreads();
  }
  share.store(rows, params, blocks);
#endif
}

template <class Shape>
void run(const AttentionPaged& args, const DecodeProblem& problem) {
  const Device device = args.q.device();
  const int64_t tokens = args.q.dim(0), columns = problem.kv_heads * problem.parts;
  // Blocks share a row's chunks as long as there are multiprocessors without one.
  int multiprocessors = 0;
  COHORT_CUDA_CHECK(
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device.index));
  constexpr unsigned kMostBlocks = 8;  // of a cluster, on any GPU that has them
  const int64_t chunks = (problem.table.capacity() + kAttentionChunk - 1) / kAttentionChunk;
  unsigned cluster = 1;
  while (cluster < kMostBlocks && cluster < chunks && tokens * columns * cluster < multiprocessors)
    cluster *= 2;
  launch("attention_decode", attention_decode_kernel<Shape>,
         {.grid = dim3(blocks_for(tokens, 1), static_cast<unsigned>(columns), cluster),
          .block = Shape::kThreads,
          .shared_bytes = Shape::kSharedBytes,
          .start = Start::kBesidePrevious,
          .cluster = dim3(1, 1, cluster)},
         device, problem);
}

}  // namespace

bool can_decode(const AttentionPaged& args) {
  return args.q.dtype() == DType::kBF16 &&
         ::cohort::cuda::is_for_hopper(
             reinterpret_cast<const void*>(attention_decode_kernel<DecodeShape<64, 3>>),
             args.q.device());
}

void attention_decode(const AttentionPaged& args) {
  const int64_t heads = args.q.dim(1), dim = args.q.dim(2), kv_heads = args.cache.k.dim(2);
  const DecodeProblem problem{
      .q = pointer<Bf16>(args.q),
      .k = pointer<Bf16>(args.cache.k),
      .v = pointer<Bf16>(args.cache.v),
      .o = pointer<Bf16>(args.o),
      .sequences = pointer<int32_t>(args.sequences),
      .positions = pointer<int32_t>(args.positions),
      .table = page_table(args.cache),
      .q_stride = args.q.strides()[0],
      .heads = static_cast<int>(heads),
      .kv_heads = static_cast<int>(kv_heads),
      .parts = static_cast<int>((heads / kv_heads + 15) / 16),
      .params = {.c = exponent_scale(args.desc, dim),
                 .window = key_window(args.desc),
                 .head_dim = static_cast<int>(dim),
                 .vectorized = vectorized_heads<Bf16>(args.q, args.cache.k, args.cache.v, args.o),
                 .dropout = {}}};
  dispatch_head_dim(dim, [&]<int kDim>() { run<DecodeShape<kDim, 3>>(args, problem); });
}

}  // namespace cohort::kernels::cuda
