// attention_decode() in bf16 on sm_90. A step is bound by reading keys and values where there are
// many sequences, and by how long one takes where there are few.
//
// A block has one token and the query heads that share a key head, up to 16 rows, which it rotates,
// and goes over the tiles of keys of its chunks. The token's own key and value go to the cache and,
// without waiting for that, into the tile that they belong to. All warps share the rows: each
// computes S and P for a share of the tile's keys and O for a share of the head dim. Between them
// go round, in shared memory, the row max, P in f32 (for l, whose order is that of one thread that
// sees all keys) and P in bf16 (for P V). Two warps more have the copy engine bring keys and
// values, several tiles at a time: a lane asks for a box of one block of the cache and 64 columns,
// whose rows of 128 bytes are swizzled for ldmatrix. Operands are asked for before the first
// product of a chain, which would wait for each in turn.
//
// Where there are fewer blocks than the device can run, those of a cluster share the rows' chunks:
// block b takes chunks b, b + size, ... of those that the rows see. After each round every block
// joins a share of O's elements, reading the chunks' in ascending order from the shared memory of
// the others; one chunk of one block is the same with nothing to wait for.
#include <bit>

#include "kernels/attention/cuda/decode_tiles.cuh"
#include "kernels/cuda/cluster.cuh"

namespace cohort::kernels::cuda {
namespace {

// A barrier of the warps that compute.
template <class Shape>
__device__ __forceinline__ void sync_computing() {
  asm volatile("bar.sync 1, %0;\n" ::"n"(Shape::kComputing) : "memory");
}

// What a warp computes of a chunk: rows `group` and `group` + 8 of O, its columns; l of four rows
// in its parts, lane % 16 = 4 row + part.
template <class Shape>
struct DecodeWarp {
  float row_max_log2[2], l, o[Shape::kOwnColumns / 8][4];
  uint32_t q[Shape::kDim / 16][4];  // the rows' queries, for S
  char* shared;
  int warp, group, quad;
  int sum_row, part;  // of l
  // Where the lane's rows of operands lie in a tile of keys, of values and in P: steps along a row
  // change the swizzled bits, and others are added.
  uint32_t k_row, k_swizzle, v_row, v_swizzle, p_row, p_swizzle;

  __device__ explicit DecodeWarp(char* memory)
      : shared(memory),
        warp(static_cast<int>(threadIdx.x / 32)),
        group(static_cast<int>(threadIdx.x % 32 / 4)),
        quad(static_cast<int>(threadIdx.x % 4)),
        sum_row(4 * warp + static_cast<int>(threadIdx.x % 16 / 4)),
        part(static_cast<int>(threadIdx.x % 4)) {
    const uint32_t lane = threadIdx.x % 32, own = warp;
    const uint32_t chunk = own * (Shape::kOwnColumns / 8) + lane / 16;  // of 8 columns of values
    k_row = (own * Shape::kOwnKeys + lane / 16 * 8 + lane % 8) * kRowBytes;
    k_swizzle = (lane / 8 % 2 ^ lane % 8) * 16;
    v_row = (chunk / 8 * Shape::kKeys + lane % 16) * kRowBytes;
    v_swizzle = (chunk % 8 ^ lane % 8) * 16;
    p_row = Shape::kScoreBytes + lane % 16 * (2 * Shape::kKeys);
    p_swizzle = (lane / 16 ^ lane % 8) * 16;
    start();
  }
  __device__ float* floats(int offset) const { return reinterpret_cast<float*>(shared + offset); }

  // Rows of head_dim elements, rotated, to rows of kDim; zeros in the rest of them and of `all`.
  static __device__ void rotate_rows(Bf16* to, const Bf16* from, int count, int all, int position,
                                     const DecodeProblem& p) {
    const int half = p.head_dim / 2;
    for (int i = static_cast<int>(threadIdx.x); i < all * (Shape::kDim / 8);
         i += Shape::kComputing) {
      const int row = i / (Shape::kDim / 8), column = i % (Shape::kDim / 8) * 8;
      const bool live = row < count && column < p.head_dim;
      Bf16* const y = to + row * Shape::kDim + column;
      const Bf16* const x = from + row * p.head_dim + column;
      if (!live || p.rope.data == nullptr)
        store_raw(y, live ? load_raw<8>(x) : Raw<Bf16, 8>{});
      else if (column < half)
        rotate<8>(y, x, half, Angles<8>(p.rope, position, column), 1.0f, false);
    }
  }

  __device__ void start() {
    row_max_log2[0] = row_max_log2[1] = -INFINITY;
    l = 0;
#pragma unroll
    for (auto& n : o)
#pragma unroll
      for (float& x : n) x = 0;
  }

  // The rows' queries, rotated, and the token's key and value.
  __device__ void prepare(const DecodeRows& rows, const DecodeProblem& p) {
    rotate_rows(reinterpret_cast<Bf16*>(shared + Shape::kOutputs), rows.q, rows.count, Shape::kRows,
                rows.position, p);
    rotate_rows(reinterpret_cast<Bf16*>(shared + Shape::kNewKey), rows.k, 1, 1, rows.position, p);
    const int column = 8 * static_cast<int>(threadIdx.x);
    const bool live = column < p.head_dim;
    auto* const value = reinterpret_cast<Bf16*>(shared + Shape::kNewValue) + column;
    if (column < Shape::kDim)
      store_raw(value, live ? load_raw<8>(rows.v + column) : Raw<Bf16, 8>{});
    sync_computing<Shape>();
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int d = 0; d < Shape::kDim / 16; ++d)
      load_matrices(q[d], shared_address(shared) + Shape::kOutputs + lane % 16 * (2 * Shape::kDim) +
                              32 * d + lane / 16 * 16);
  }
  // Writes the token's key and value to the cache.
  __device__ void write_to_cache(const DecodeRows& rows, const DecodeProblem& p) const {
    const int column = 8 * static_cast<int>(threadIdx.x);
    if (rows.slot < 0 || column >= p.head_dim) return;
    const int64_t at = (rows.slot * p.kv_heads + rows.kv_head) * p.head_dim + column;
    const auto* const row = reinterpret_cast<const Bf16*>(shared + Shape::kNewKey) + column;
    store_raw(p.k_cache + at, load_raw<8>(row));
    store_raw(p.v_cache + at, load_raw<8>(row + Shape::kDim));
  }
  // Puts the token's key (kNewKey) or value (kNewValue) into row `row` of a tile.
  __device__ void insert(char* tile, int row, int from) const {
    const int chunk = static_cast<int>(threadIdx.x);
    if (chunk >= Shape::kDim / 8) return;
    *reinterpret_cast<uint4*>(tile + box_offset<Shape>(row, chunk)) =
        *reinterpret_cast<const uint4*>(shared + from + 16 * chunk);
  }

  // S of the warp's keys, masked, and its row max for the others. key0: the tile's first key. All
  // operands are asked for before the first product, which would wait for each in turn.
  __device__ void scores(float (&s)[2 * Shape::kOwnGroups][4], uint32_t keys, int key0,
                         const DecodeRows& rows, int window) {
    const int first = warp * Shape::kOwnKeys, seen = rows.visible - key0;
    uint32_t k[Shape::kOwnGroups][Shape::kDim / 16][4];
#pragma unroll
    for (int d = 0; d < Shape::kDim / 16; ++d) {
      const uint32_t at =
          keys + k_row + d / 4 * (Shape::kKeys * kRowBytes) + (k_swizzle ^ d % 4 * 32);
#pragma unroll
      for (int g = 0; g < Shape::kOwnGroups; ++g) load_matrices(k[g][d], at + 16 * g * kRowBytes);
    }
#pragma unroll
    for (auto& n : s)
#pragma unroll
      for (float& x : n) x = 0;
#pragma unroll
    for (int d = 0; d < Shape::kDim / 16; ++d)
#pragma unroll
      for (int g = 0; g < Shape::kOwnGroups; ++g) {
        mma_bf16(s[2 * g], q[d], k[g][d][0], k[g][d][1]);
        mma_bf16(s[2 * g + 1], q[d], k[g][d][2], k[g][d][3]);
      }
    if (seen < Shape::kKeys || seen > window) {  // the tile has keys that the rows do not see
#pragma unroll
      for (int n = 0; n < 2 * Shape::kOwnGroups; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int key = first + 8 * n + 2 * quad + e % 2;
          if (key >= seen || key < seen - window) s[n][e] = -INFINITY;
        }
    }
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (const auto& n : s)
#pragma unroll
      for (int e = 0; e < 4; ++e) largest[e / 2] = fmaxf(largest[e / 2], n[e]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = fmaxf(largest[r], __shfl_xor_sync(0xffffffffu, largest[r], 1));
      largest[r] = fmaxf(largest[r], __shfl_xor_sync(0xffffffffu, largest[r], 2));
      if (quad == 0) floats(Shape::kMaxima)[warp * Shape::kRows + group + 8 * r] = largest[r];
    }
  }

  // P of the warp's keys, to the place of the tile's keys, which the copy engine fills again; O is
  // scaled.
  __device__ void probabilities(const float (&s)[2 * Shape::kOwnGroups][4], char* keys, float c) {
    float origin[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* const maxima = floats(Shape::kMaxima) + group + 8 * r;
      float largest = maxima[0];
#pragma unroll
      for (int w = 1; w < Shape::kWarps; ++w) largest = fmaxf(largest, maxima[w * Shape::kRows]);
      const float raised = fmaxf(row_max_log2[r], largest * c);
      origin[r] = raised == -INFINITY ? 0.0f : raised;  // as in raise_maximum()
      const float alpha = fast_exp2(row_max_log2[r] - origin[r]);
      row_max_log2[r] = raised;
      if (warp == 0 && quad == 0) floats(Shape::kAlphas)[group + 8 * r] = alpha;
#pragma unroll
      for (auto& n : o) {
        n[2 * r] *= alpha;
        n[2 * r + 1] *= alpha;
      }
    }
    auto* const exact = reinterpret_cast<float*>(keys) + group * Shape::kScoreStride +
                        warp * Shape::kOwnKeys + 2 * quad;
    const uint32_t rounded =
        shared_address(keys) + Shape::kScoreBytes + group * (2 * Shape::kKeys) + 4 * quad;
#pragma unroll
    for (int n = 0; n < 2 * Shape::kOwnGroups; ++n) {
      const uint32_t swizzled = ((warp * Shape::kOwnKeys / 8 + n) ^ group) * 16;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Pack<float, 2> p{fast_exp2(__fmaf_rn(s[n][2 * r], c, -origin[r])),
                               fast_exp2(__fmaf_rn(s[n][2 * r + 1], c, -origin[r]))};
        store_pack(exact + 8 * r * Shape::kScoreStride + 8 * n, p);
        asm volatile(
            "st.shared.b32 [%0], %1;\n" ::"r"(rounded + swizzled + 8 * r * (2 * Shape::kKeys)),
            "r"(pack_bf16(p.v[0], p.v[1]))
            : "memory");
      }
    }
  }

  // l and O go up by the tile's P. Keys that the rows do not see add zeros.
  __device__ void sums(const char* keys, uint32_t values) {
    constexpr int kBlocks = Shape::kOwnColumns / 16;
    const auto* const exact =
        reinterpret_cast<const float*>(keys) + sum_row * Shape::kScoreStride + 2 * part;
    const uint32_t rounded = shared_address(keys) + p_row;
    Pack<float, 2> p[Shape::kKeys / 8];
    uint32_t a[Shape::kGroups][4], v[Shape::kGroups][kBlocks][4];
#pragma unroll
    for (int i = 0; i < Shape::kKeys / 8; ++i) p[i] = load_pack<2>(exact + 8 * i);
#pragma unroll
    for (int g = 0; g < Shape::kGroups; ++g) {
      load_matrices(a[g], rounded + (p_swizzle ^ g * 32));
#pragma unroll
      for (int n = 0; n < kBlocks; ++n)
        load_matrices_transposed(v[g][n],
                                 values + v_row + 16 * g * kRowBytes + (v_swizzle ^ n * 32));
    }
    l *= floats(Shape::kAlphas)[sum_row];
#pragma unroll
    for (const auto& pair : p) {
      l += pair.v[0];
      l += pair.v[1];
    }
#pragma unroll
    for (int g = 0; g < Shape::kGroups; ++g)
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        mma_bf16(o[2 * n], a[g], v[g][n][0], v[g][n][1]);
        mma_bf16(o[2 * n + 1], a[g], v[g][n][2], v[g][n][3]);
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

  __device__ void store(const DecodeRows& rows, int head_dim, int blocks) const {
#pragma unroll
    for (int i = 0; i < Shape::kPacks; ++i) {
      const int pack = pack_of(i, blocks), row = pack / (Shape::kDim / 4);
      const int column = 4 * (pack % (Shape::kDim / 4)), at = row * head_dim + column;
      if (row >= rows.count || column >= head_dim) continue;
      const float inverse = 1.0f / states[i].l;
      Pack<Bf16, 4> out;
#pragma unroll
      for (int e = 0; e < 4; ++e) out.v[e] = from_float<Bf16>(o[i].v[e] * inverse + 0.0f);
      store_pack(rows.o + at, out);
    }
  }

 private:
  static __device__ int pack_of(int i, int blocks) {
    return (i * blocks + static_cast<int>(blockIdx.z)) * Shape::kComputing +
           static_cast<int>(threadIdx.x);
  }
};

// Rows of values that no query sees, in blocks that are partly written, become zeros.
template <class Shape>
__device__ __forceinline__ void clear_values(char* values, int first) {
  constexpr int kChunks = Shape::kDim / 8;
  for (int i = static_cast<int>(threadIdx.x); i < (Shape::kKeys - first) * kChunks;
       i += Shape::kComputing)
    *reinterpret_cast<uint4*>(values + box_offset<Shape>(first + i / kChunks, i % kChunks)) =
        uint4{};
}

// The tiles of one chunk, from `tile` on. Returns the block's next tile.
template <class Shape>
__device__ __forceinline__ int decode_chunk(DecodeWarp<Shape>& warp, TileRing<Shape>& ring,
                                            const DecodeRows& rows, const DecodeProblem& problem,
                                            int tile, int blocks) {
  const int chunk = tile / Shape::kChunkTiles;
#pragma unroll 1
  for (; tile < rows.tiles && tile / Shape::kChunkTiles == chunk;
       tile = next_tile<Shape>(tile, blocks)) {
    const int key0 = tile * Shape::kKeys;
    char* const keys = warp.shared + (ring.keys() - ring.base);
    // The last key is the token's own, if the cache has a place for it.
    const int own = rows.slot >= 0 && tile == rows.tiles - 1 ? rows.visible - 1 - key0 : -1;
    barrier_wait(ring.keys_full(), ring.parity);
    if (own >= 0) {
      warp.insert(keys, own, Shape::kNewKey);
      sync_computing<Shape>();
    }
    float s[2 * Shape::kOwnGroups][4];
    warp.scores(s, ring.keys(), key0, rows, problem.window);
    sync_computing<Shape>();
    warp.probabilities(s, keys, problem.c);
    barrier_wait(ring.values_full(), ring.parity);
    if (rows.visible < key0 + Shape::kKeys)
      clear_values<Shape>(keys + Shape::kTileBytes, rows.visible - key0);
    if (own >= 0) warp.insert(keys + Shape::kTileBytes, own, Shape::kNewValue);
    sync_computing<Shape>();
    warp.sums(keys, ring.values());
    fence_before_tma();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty());
    ring.advance();
  }
  return tile;
}

// Computes a block's rows: see the top of the file.
template <class Shape>
__device__ __forceinline__ void decode(TileRing<Shape> ring, char* shared, const DecodeRows& rows,
                                       const DecodeProblem& problem, int tile, int chunks,
                                       int blocks) {
  DecodeWarp<Shape> warp(shared);
  warp.prepare(rows, problem);
  const bool has_last = (chunks - 1) % blocks == static_cast<int>(blockIdx.z);
  if (has_last && rows.is_first_part) warp.write_to_cache(rows, problem);
  JoinedShare<Shape> share;
#pragma unroll 1
  for (int done = 0; done < chunks; done += blocks) {
    if (done + static_cast<int>(blockIdx.z) < chunks) {
      tile = decode_chunk(warp, ring, rows, problem, tile, blocks);
      warp.finish();
    }
    blocks > 1 ? cluster_sync() : sync_computing<Shape>();
    for (int from = 0; from < min(blocks, chunks - done); ++from)
      share.take(shared, from, blocks, done + from == 0);
    // The places are used again, and a block's memory is read until all are here.
    blocks > 1 ? cluster_sync() : sync_computing<Shape>();
  }
  share.store(rows, problem.head_dim, blocks);
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    attention_decode_kernel(const __grid_constant__ DecodeProblem problem,
                            const __grid_constant__ CUtensorMap k,
                            const __grid_constant__ CUtensorMap v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ char memory[];
  char* const shared = memory + (1024 - shared_address(memory) % 1024) % 1024;
  const int thread = static_cast<int>(threadIdx.x);
  TileRing<Shape> ring{.base = shared_address(shared)};
  if (thread < Shape::kStages) {
    ring.stage = thread;
    barrier_init(ring.keys_full(), 1);
    barrier_init(ring.values_full(), 1);
    barrier_init(ring.empty(), Shape::kWarps);
    ring.stage = 0;
  }
  const bool copies = thread >= Shape::kComputing, is_keys = thread < Shape::kComputing + 32;
  const CUtensorMap* const map = is_keys ? &k : &v;
  if (copies && thread % 32 == 0) tma_prefetch(map);
  __syncthreads();
  let_next_start();
  if (!copies || !problem.reads_early) wait_for_previous();
  const DecodeRows rows(problem, Shape::kKeys);
  const auto rank = static_cast<int>(blockIdx.z);
  if (rows.blocks == nullptr) {
    if (rank == 0 && !copies)
      for (int i = thread; i < rows.count * problem.head_dim; i += Shape::kComputing)
        rows.o[i] = from_float<Bf16>(0.0f);
    return;
  }
  const int first_chunk = rows.first_tile / Shape::kChunkTiles;
  const int chunks = (rows.tiles - 1) / Shape::kChunkTiles + 1 - first_chunk;
  // One chunk needs no company.
  const int blocks = chunks > 1 ? static_cast<int>(gridDim.z) : 1;
  if (rank >= blocks) return;
  int tile = rank == 0 ? rows.first_tile : (first_chunk + rank) * Shape::kChunkTiles;
  if (!copies) return decode(ring, shared, rows, problem, tile, chunks, blocks);
  TileCopier<Shape> copier(map, ring, problem, rows, tile, blocks);
  for (int done = 0; done < chunks; done += blocks) {
    if (done + rank < chunks) tile = copier.copy_chunk(tile, is_keys);
    if (blocks == 1) continue;
    cluster_sync();
    cluster_sync();
  }
#endif
}

// Describes keys or values [blocks, block_tokens, Hkv, D] to the copy engine.
CUtensorMap describe(const Tensor& t, int box_tokens) {
  const auto size = [&](int i) { return static_cast<cuuint64_t>(t.dim(i)); };
  const cuuint64_t head = size(3) * sizeof(Bf16), token = size(2) * head, block = size(1) * token;
  return tma_describe({.t = t,
                       .sizes = {size(3), size(2), size(1), size(0)},
                       .strides = {head, token, block},
                       .box = {kBoxColumns, 1, static_cast<cuuint32_t>(box_tokens), 1}});
}

template <class Shape>
void run(const AttentionDecode& args, const DecodeProblem& problem, unsigned cluster) {
  launch("attention_decode", attention_decode_kernel<Shape>,
         {.grid = dim3(blocks_for(args.o.dim(0) * problem.kv_heads * problem.parts, 1), 1, cluster),
          .block = Shape::kThreads,
          .shared_bytes = Shape::kSharedBytes,
          .start = Start::kBesidePrevious,
          .cluster = dim3(1, 1, cluster)},
         args.o.device(), problem, describe(args.cache.k, problem.box_tokens),
         describe(args.cache.v, problem.box_tokens));
}

// Whether the kernel takes the call: bf16, heads whose halves are rows of 16 bytes, blocks of the
// cache of 8, 16, 32, ... tokens (8 rows are the swizzle's period), a GPU from sm_90 on that the
// program was compiled for.
bool takes(const AttentionDecode& args) {
  const Tensor& cache = args.cache.k;
  const auto block = static_cast<uint64_t>(cache.dim(1));
  return args.qkv.dtype() == DType::kBF16 && cache.numel() > 0 && cache.dim(3) % 16 == 0 &&
         block >= 8 && std::has_single_bit(block) &&
         aligned(pointer<Bf16>(args.qkv), pointer<Bf16>(cache), pointer<Bf16>(args.cache.v),
                 pointer<Bf16>(args.o), pointer<float>(args.table)) &&
         ::cohort::cuda::is_for_hopper(
             reinterpret_cast<const void*>(attention_decode_kernel<DecodeShape<64, 2>>),
             args.o.device());
}

}  // namespace

bool attention_decode(const AttentionDecode& args) {
  if (!takes(args)) return false;
  const int64_t tokens = args.o.dim(0), heads = args.o.dim(1), dim = args.o.dim(2),
                block = args.cache.k.dim(1), kv_heads = args.cache.k.dim(2);
  DecodeProblem problem{.qkv = pointer<Bf16>(args.qkv),
                        .o = pointer<Bf16>(args.o),
                        .k_cache = pointer<Bf16>(args.cache.k),
                        .v_cache = pointer<Bf16>(args.cache.v),
                        .sequences = pointer<int32_t>(args.sequences),
                        .positions = pointer<int32_t>(args.positions),
                        .table = page_table(args.cache),
                        .rope = {},
                        .heads = static_cast<int>(heads),
                        .kv_heads = static_cast<int>(kv_heads),
                        .head_dim = static_cast<int>(dim),
                        .parts = static_cast<int>((heads / kv_heads + 15) / 16),
                        .block_shift = std::countr_zero(static_cast<uint64_t>(block)),
                        .box_tokens = static_cast<int>(std::min(block, attention_tile(dim))),
                        .c = exponent_scale(args.desc, dim),
                        .window = key_window(args.desc),
                        .reads_early = EarlyReads::are_allowed()};
  if (args.table.defined())
    problem.rope = {.data = pointer<float>(args.table),
                    .rows = args.table.dim(0),
                    .half = static_cast<int>(dim / 2)};
  int multiprocessors = 0;
  COHORT_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount,
                                           args.o.device().index));
  // Blocks share a row's chunks as long as there are multiprocessors without one.
  constexpr unsigned kMostBlocks = 8;  // of a cluster, on any GPU that has them
  const int64_t blocks = tokens * kv_heads * problem.parts;
  const int64_t chunks = (problem.table.capacity() + kAttentionChunk - 1) / kAttentionChunk;
  unsigned cluster = 1;
  while (cluster < kMostBlocks && cluster < chunks && blocks * cluster < multiprocessors)
    cluster *= 2;
  // With few blocks, more stages for each; with many, more blocks for a multiprocessor.
  if (dim <= 64 && blocks * cluster > multiprocessors) {
    run<DecodeShape<64, 2>>(args, problem, cluster);
  } else {
    dispatch_head_dim(dim, [&]<int kDim>() {
      run<DecodeShape<kDim, kDim == 64 ? 4 : 3>>(args, problem, cluster);
    });
  }
  return true;
}

}  // namespace cohort::kernels::cuda
