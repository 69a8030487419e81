// Work decomposition of decode.cu, and the loads of keys and values into shared memory.
#pragma once

#include "kernels/attention/cuda/attention.cuh"
#include "kernels/attention/cuda/paged.cuh"
#include "kernels/cuda/rotate.cuh"
#include "kernels/cuda/sm90/pipeline.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#pragma nv_diag_suppress 177  // the kernel bodies are empty for older GPUs
#endif

namespace cohort::kernels::cuda {

inline constexpr int kBoxColumns = 64, kRowBytes = kBoxColumns * int{sizeof(bf16)};

struct DecodeProblem {
  const bf16* qkv;
  bf16 *o, *k_cache, *v_cache;
  const int32_t *sequences, *positions;
  PageTable table;
  RopeTable rope;
  int64_t o_stride;  // token stride in elements
  int heads, kv_heads, head_dim;
  int parts;          // blocks per group of heads
  int block_shift;    // log2 of the tokens per cache block
  int box_tokens;     // tokens per TMA box, within one cache block
  bool may_prefetch;  // all inputs but qkv
};

template <int kDim_, int kStages_>
struct DecodeShape {
  static constexpr int kDim = kDim_, kStages = kStages_;
  // Consumer warps; two producer warps load keys and values.
  static constexpr int kWarps = 4, kComputing = 32 * kWarps, kThreads = kComputing + 64;
  static constexpr int kRows = 16;
  static constexpr int kKeys = kTileKeys<kDim>, kGroups = kKeys / 16;
  static constexpr int kChunkTiles = kAttentionChunk / kKeys;
  // Groups of 16 keys per warp of a tile, and columns of the head dim per warp.
  static constexpr int kGroupsPerWarp = kGroups / kWarps, kKeysPerWarp = 16 * kGroupsPerWarp;
  static constexpr int kColumnsPerWarp = kDim / kWarps;
  // A stage holds keys, then values, each as kDim / 64 boxes of [kKeys, 64].
  static constexpr int kTileBytes = 2 * kKeys * kDim;
  // P overwrites the keys of the tile: in f32, with rows off the multiples of 32 banks, then in
  // bf16.
  static constexpr int kScoreStride = kKeys + 8, kScoreBytes = 4 * kRows * kScoreStride;
  static_assert(kScoreBytes + 2 * kRows * kKeys <= kTileBytes);
  // Packs of 4 elements of O that a thread combines and writes in a cluster of one block.
  static constexpr int kPacks = kRows * kDim / 4 / kComputing;
  // After the stages: O of a chunk, and before it the queries; the key and value of the token;
  // chunk states, row maxima per warp, alpha, barriers.
  static constexpr int kOutputs = 2 * kStages * kTileBytes;
  static constexpr int kNewKey = kOutputs + 4 * kRows * kDim, kNewValue = kNewKey + 2 * kDim;
  static constexpr int kStates = kNewValue + 2 * kDim;
  static constexpr int kMaxima = kStates + kRows * int{sizeof(ChunkState)};
  static constexpr int kAlphas = kMaxima + 4 * kWarps * kRows;
  static constexpr int kBarriers = kAlphas + 4 * kRows;
  // Boxes are aligned to 1 KiB, the period of the swizzle.
  static constexpr size_t kSharedBytes = 1024 + kBarriers + Pipeline<kStages, 2>::kBytes;
  static constexpr int kBlocksPerSm = (228 << 10) / (kSharedBytes + 1024);  // sm_90
};

// Byte offset of 8 columns of a row in a tile.
template <class Shape>
__device__ __forceinline__ uint32_t box_offset(int row, int chunk) {
  return static_cast<uint32_t>(((chunk / 8) * Shape::kKeys + row) * kRowBytes +
                               ((chunk % 8) ^ (row & 7)) * 16);
}

// The rows of a block, and the tiles of its keys.
struct DecodeRows {
  const bf16 *q, *k, *v;  // rows of this token
  bf16* o;
  const int32_t* blocks;  // block table row of the sequence; null: the token is idle
  int position, kv_head, first_head;
  bool is_first_part;
  int count;     // rows
  int64_t slot;  // cache slot of the token; negative if it has none
  int end_key;   // end of the keys that the rows see
  IndexRange<int> tiles;

  template <class Problem>
  __device__ DecodeRows(const Problem& p, int keys_per_tile) {
    // Blocks of a token are adjacent, as are its heads in memory.
    const int columns = p.kv_heads * p.parts, column = static_cast<int>(blockIdx.x) % columns;
    const int64_t token = static_cast<int>(blockIdx.x) / columns;
    const int group = p.heads / p.kv_heads;
    const int in_group = column % p.parts * 16;
    kv_head = column / p.parts;
    first_head = kv_head * group + in_group;
    is_first_part = column % p.parts == 0;
    const int64_t head = kv_head * group + in_group;
    // Prefetching reads must bypass L1, which may hold outdated data.
    const int sequence = __ldcg(p.sequences + token);
    position = __ldcg(p.positions + token);
    q = p.qkv + (token * (p.heads + 2 * p.kv_heads) + head) * p.head_dim;
    k = q + (p.heads + kv_head - head) * p.head_dim;
    v = k + p.kv_heads * p.head_dim;
    o = p.o + token * p.o_stride + head * p.head_dim;
    blocks = position >= 0 && p.table.has(sequence) ? p.table.row(sequence) : nullptr;
    slot = blocks != nullptr ? p.table.slot(blocks, position) : -1;
    count = min(16, group - in_group);
    end_key = p.table.keys_of(position);
    tiles = IndexRange<int>{max(0, p.rule.first_key(end_key)), end_key}.tiles(keys_per_tile);
  }
  __device__ int head(int row) const { return first_head + min(row, count - 1); }
};

// Stages of a tile of keys, filled by producer 0, and one of values, by producer 1.
template <class Shape>
struct DecodeStages {
  uint32_t base;
  Pipeline<Shape::kStages, 2> pipeline{base + Shape::kBarriers};

  __device__ uint32_t tile(int stage, int producer) const {
    return base + (2 * stage + producer) * Shape::kTileBytes;
  }
};

// Next tile of a block, whose chunks are `blocks` chunks apart.
template <class Shape>
__device__ __forceinline__ int next_tile(int tile, int blocks) {
  const bool ends_chunk = (tile + 1) % Shape::kChunkTiles == 0;
  return tile + 1 + (ends_chunk ? (blocks - 1) * Shape::kChunkTiles : 0);
}

// Producer warp of the keys (`producer` 0), or values (1), of the tiles of a block.
template <class Shape>
class TileProducer {
 public:
  // Each lane loads one box per tile, at fixed row and box column.
  __device__ TileProducer(const CUtensorMap* map, const DecodeStages<Shape>& stages,
                          const DecodeProblem& problem, const DecodeRows& rows, int tile,
                          int blocks)
      : map_(map), stages_(stages), problem_(problem), rows_(rows), blocks_(blocks) {
    const int lane = static_cast<int>(threadIdx.x % 32), boxes = Shape::kKeys / problem.box_tokens;
    loads_box_ = lane < boxes * (Shape::kDim / kBoxColumns);
    row_ = lane % boxes * problem.box_tokens;
    column_ = lane / boxes;
    find_block(tile);
  }
  // Loads the tiles of one chunk, from `tile` on. Returns the next tile of the block.
  __device__ int load_chunk_tiles(int tile, int producer) {
    const int chunk = tile / Shape::kChunkTiles;
    while (tile < rows_.tiles.end && tile / Shape::kChunkTiles == chunk) {
      const int in_block = (tile * Shape::kKeys + row_) & (problem_.table.block_tokens - 1);
      const TmaCoordinates from{{column_ * kBoxColumns, rows_.kv_head, in_block, block_}};
      tile = next_tile<Shape>(tile, blocks_);
      find_block(tile);  // ahead of its use
      stages_.pipeline.producer_acquire(state_);
      const uint32_t full = stages_.pipeline.full(state_.index, producer);
      if (threadIdx.x % 32 == 0) barrier_arrive_expect_tx(full, Shape::kTileBytes);
      __syncwarp();
      const uint32_t to = stages_.tile(state_.index, producer);
      if (loads_box_) tma_load(to + (column_ * Shape::kKeys + row_) * kRowBytes, map_, from, full);
      state_.advance();
    }
    return tile;
  }

 private:
  // Looks up the cache block of the lane. Block -1 is outside the cache and loads zeros.
  __device__ void find_block(int tile) {
    const int key = tile * Shape::kKeys + row_;
    block_ = key < rows_.end_key ? __ldcg(rows_.blocks + (key >> problem_.block_shift)) : -1;
  }

  const CUtensorMap* map_;
  const DecodeStages<Shape> stages_;
  ProducerState<Shape::kStages> state_;
  const DecodeProblem& problem_;
  const DecodeRows& rows_;
  int blocks_;
  bool loads_box_;
  int row_, column_, block_;
};

}  // namespace cohort::kernels::cuda
