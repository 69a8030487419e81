// What the blocks of decode.cu work on, and how their keys and values arrive in shared memory.
#pragma once

#include "kernels/attention/cuda/attention.cuh"
#include "kernels/attention/cuda/paged.cuh"
#include "kernels/cuda/rotate.cuh"
#include "kernels/cuda/tma.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#pragma nv_diag_suppress 177  // code for older GPUs has the kernels without what they do
#endif

namespace cohort::kernels::cuda {

using Bf16 = __nv_bfloat16;
inline constexpr int kBoxColumns = 64, kRowBytes = kBoxColumns * int{sizeof(Bf16)};

struct DecodeProblem {
  const Bf16* qkv;
  Bf16 *o, *k_cache, *v_cache;
  const int32_t *sequences, *positions;
  PageTable table;
  RopeTable rope;
  int heads, kv_heads, head_dim;
  int parts;         // blocks that the heads of a group need
  int block_shift;   // 1 << block_shift tokens make a block of the cache
  int box_tokens;    // a copy's, of one block of the cache
  float c;           // exponents of 2 per unit of score
  int window;        // how many keys a row sees at most
  bool reads_early;  // of all but qkv (EarlyReads)
};

template <int kDim_, int kStages_>
struct DecodeShape {
  static constexpr int kDim = kDim_, kStages = kStages_;
  // Warps that compute; two more copy keys and values.
  static constexpr int kWarps = 4, kComputing = 32 * kWarps, kThreads = kComputing + 64;
  static constexpr int kRows = 16;
  static constexpr int kKeys = kTileKeys<kDim>, kGroups = kKeys / 16;
  static constexpr int kChunkTiles = kAttentionChunk / kKeys;
  // A warp's share of the tile's groups of 16 keys, and of the head dim in columns.
  static constexpr int kOwnGroups = kGroups / kWarps, kOwnKeys = 16 * kOwnGroups;
  static constexpr int kOwnColumns = kDim / kWarps;
  // A stage has keys, then values, each as kDim / 64 boxes of [kKeys, 64].
  static constexpr int kTileBytes = 2 * kKeys * kDim;
  // P takes the place of the tile's keys: in f32, rows off the multiples of 32 banks, then in bf16.
  static constexpr int kScoreStride = kKeys + 8, kScoreBytes = 4 * kRows * kScoreStride;
  static_assert(kScoreBytes + 2 * kRows * kKeys <= kTileBytes);
  // Packs of 4 elements of O that a thread joins and writes, if its block is alone.
  static constexpr int kPacks = kRows * kDim / 4 / kComputing;
  // After the stages: O of a chunk, and before it the queries; the token's key and value; states of
  // the chunk, the row max of each warp's keys, alpha, barriers.
  static constexpr int kOutputs = 2 * kStages * kTileBytes;
  static constexpr int kNewKey = kOutputs + 4 * kRows * kDim, kNewValue = kNewKey + 2 * kDim;
  static constexpr int kStates = kNewValue + 2 * kDim;
  static constexpr int kMaxima = kStates + kRows * int{sizeof(ChunkState)};
  static constexpr int kAlphas = kMaxima + 4 * kWarps * kRows;
  static constexpr int kBarriers = kAlphas + 4 * kRows;
  // Boxes are aligned to 1 KiB, the period of the swizzle.
  static constexpr size_t kSharedBytes = 1024 + kBarriers + 3 * kStages * sizeof(uint64_t);
  static constexpr int kBlocksPerSm = (228 << 10) / (kSharedBytes + 1024);  // of sm_90
};

// Byte offset of 8 columns of a row in a tile.
template <class Shape>
__device__ __forceinline__ uint32_t box_offset(int row, int chunk) {
  return static_cast<uint32_t>(((chunk / 8) * Shape::kKeys + row) * kRowBytes +
                               ((chunk % 8) ^ (row & 7)) * 16);
}

// The block's rows, and the tiles that its keys lie in.
struct DecodeRows {
  const Bf16 *q, *k, *v;  // the token's own
  Bf16* o;
  const int32_t* blocks;  // the sequence's row of the table; null: the token is idle
  int position, kv_head;
  bool is_first_part;
  int count;     // rows
  int64_t slot;  // of the token in the cache; negative: it has none
  int visible;   // the rows see the window's last of keys 0 .. visible - 1
  int first_tile, tiles;

  __device__ DecodeRows(const DecodeProblem& p, int keys_per_tile) {
    // Blocks of a token are neighbours: its heads lie side by side in memory.
    const int columns = p.kv_heads * p.parts, column = static_cast<int>(blockIdx.x) % columns;
    const int64_t token = static_cast<int>(blockIdx.x) / columns;
    const int group = p.heads / p.kv_heads;
    const int in_group = column % p.parts * 16;
    kv_head = column / p.parts;
    is_first_part = column % p.parts == 0;
    const int64_t head = kv_head * group + in_group;
    // Early reads must not find what a multiprocessor's own cache has of them.
    const int sequence = __ldcg(p.sequences + token);
    position = __ldcg(p.positions + token);
    q = p.qkv + (token * (p.heads + 2 * p.kv_heads) + head) * p.head_dim;
    k = q + (p.heads + kv_head - head) * p.head_dim;
    v = k + p.kv_heads * p.head_dim;
    o = p.o + (token * p.heads + head) * p.head_dim;
    blocks = position >= 0 && p.table.has(sequence) ? p.table.row(sequence) : nullptr;
    slot = blocks != nullptr ? p.table.slot(blocks, position) : -1;
    count = min(16, group - in_group);
    visible = p.table.keys_of(position);
    first_tile = max(0, visible - p.window) / keys_per_tile;
    tiles = (visible + keys_per_tile - 1) / keys_per_tile;
  }
};

// Where a warp is in the ring of stages.
template <class Shape>
struct TileRing {
  uint32_t base;
  int stage = 0;
  uint32_t parity = 0;

  __device__ uint32_t keys() const { return base + 2 * stage * Shape::kTileBytes; }
  __device__ uint32_t values() const { return keys() + Shape::kTileBytes; }
  __device__ uint32_t keys_full() const { return base + Shape::kBarriers + 24 * stage; }
  __device__ uint32_t values_full() const { return keys_full() + 8; }
  __device__ uint32_t empty() const { return keys_full() + 16; }
  __device__ void advance() {
    if (++stage < Shape::kStages) return;
    stage = 0;
    parity ^= 1;
  }
};

// The tiles of a block: those of its chunks, `blocks` chunks apart.
template <class Shape>
__device__ __forceinline__ int next_tile(int tile, int blocks) {
  const bool ends_chunk = (tile + 1) % Shape::kChunkTiles == 0;
  return tile + 1 + (ends_chunk ? (blocks - 1) * Shape::kChunkTiles : 0);
}

// A warp that loads the keys, or the values, of the block's tiles.
template <class Shape>
class TileCopier {
 public:
  // The lane copies a box of each tile: from this row and column of boxes on.
  __device__ TileCopier(const CUtensorMap* map, const TileRing<Shape>& ring,
                        const DecodeProblem& problem, const DecodeRows& rows, int tile, int blocks)
      : map_(map), ring_(ring), problem_(problem), rows_(rows), blocks_(blocks) {
    const int lane = static_cast<int>(threadIdx.x % 32), boxes = Shape::kKeys / problem.box_tokens;
    copies_ = lane < boxes * (Shape::kDim / kBoxColumns);
    row_ = lane % boxes * problem.box_tokens;
    column_ = lane / boxes;
    find(tile);
  }
  // The tiles of one chunk, from `tile` on. Returns the block's next tile.
  __device__ int copy_chunk(int tile, bool is_keys) {
    const int chunk = tile / Shape::kChunkTiles;
    while (tile < rows_.tiles && tile / Shape::kChunkTiles == chunk) {
      const int in_block = (tile * Shape::kKeys + row_) & (problem_.table.block_tokens - 1);
      const TmaPlace from{{column_ * kBoxColumns, rows_.kv_head, in_block, block_}};
      tile = next_tile<Shape>(tile, blocks_);
      find(tile);  // early, before it is needed
      // A stage that was never full is empty; the first one to be emptied ends a phase of parity 0.
      if (!first_round_) barrier_wait(ring_.empty(), ring_.parity ^ 1);
      const uint32_t full = is_keys ? ring_.keys_full() : ring_.values_full();
      if (threadIdx.x % 32 == 0) barrier_arrive_expect(full, Shape::kTileBytes);
      __syncwarp();
      const uint32_t to = is_keys ? ring_.keys() : ring_.values();
      if (copies_) tma_load(to + (column_ * Shape::kKeys + row_) * kRowBytes, map_, from, full);
      ring_.advance();
      first_round_ = first_round_ && ring_.stage > 0;
    }
    return tile;
  }

 private:
  // The block of the cache that the lane copies of. None (-1) lies outside of the cache, and its
  // rows become zeros.
  __device__ void find(int tile) {
    const int key = tile * Shape::kKeys + row_;
    block_ = key < rows_.visible ? __ldcg(rows_.blocks + (key >> problem_.block_shift)) : -1;
  }

  const CUtensorMap* map_;
  TileRing<Shape> ring_;
  const DecodeProblem& problem_;
  const DecodeRows& rows_;
  int blocks_;
  bool copies_, first_round_ = true;
  int row_, column_, block_;
};

}  // namespace cohort::kernels::cuda
