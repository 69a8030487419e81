// Work decomposition of decode.cu, and the loads of keys and values into shared memory.
#pragma once

#include "kernels/attention/cuda/attention.cuh"
#include "kernels/attention/cuda/paged.cuh"
#include "kernels/cuda/e4m3.cuh"
#include "kernels/cuda/rotate.cuh"
#include "kernels/cuda/sm90/cluster.cuh"
#include "kernels/cuda/sm90/pipeline.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#pragma nv_diag_suppress 177  // the kernel bodies are empty for older GPUs
#endif

namespace cohort::kernels::cuda {

inline constexpr int kBoxColumns = 64, kRowBytes = kBoxColumns * int{sizeof(bf16)};

struct DecodeProblem {
  const bf16* qkv;
  bf16* o;
  void *k_cache, *v_cache;  // bf16, or e4m3 with scales
  const float* scales;
  const int32_t *sequences, *positions;
  PageTable table;
  RopeTable rope;
  int64_t o_stride;  // token stride in elements
  int heads, kv_heads, head_dim;
  int parts;          // items per group of heads
  int items;          // (token, key head, part)
  int block_shift;    // log2 of the tokens per cache block
  int box_tokens;     // tokens per TMA box, within one cache block; of e4m3, those of a page
  bool may_prefetch;  // all inputs but qkv
};

// C: the type of the cache, bf16 or uint8_t for e4m3. kProducers: warps, three or one.
template <class C, int kDim_, int kStages_, int kProducers_ = 3>
struct DecodeShape {
  using Cache = C;
  static constexpr bool kIsE4m3 = sizeof(C) == 1, kOneProducer = kProducers_ == 1;
  static constexpr int kDim = kDim_, kStages = kStages_;
  // Consumer warps; three producer warps, or a single one, load keys, values and item inputs.
  static constexpr int kWarps = 4, kComputing = 32 * kWarps;
  static constexpr int kThreads = kComputing + 32 * kProducers_;
  static constexpr int kRows = 16;
  static constexpr int kKeys = kTileKeys<kDim>, kGroups = kKeys / 16;
  static constexpr int kChunkTiles = kAttentionChunk / kKeys;
  // Groups of 16 keys per warp of a tile, and columns of the head dim per warp.
  static constexpr int kGroupsPerWarp = kGroups / kWarps, kKeysPerWarp = 16 * kGroupsPerWarp;
  static constexpr int kColumnsPerWarp = kDim / kWarps;
  // A stage holds keys, then values, each as kDim / 64 boxes of [kKeys, 64], or as pages.
  static constexpr int kTileBytes = int{sizeof(C)} * kKeys * kDim;
  // P overwrites the keys of the tile: in f32, with rows off the multiples of 32 banks, then in
  // bf16. In e4m3, whose keys are smaller, it has memory of its own.
  static constexpr int kScoreStride = kKeys + 8, kScoreBytes = 4 * kRows * kScoreStride;
  static constexpr int kProbabilityBytes = kScoreBytes + 2 * kRows * kKeys;
  static_assert(kIsE4m3 || kProbabilityBytes <= kTileBytes);
  // Packs of 4 elements of O that a thread combines and writes in a cluster of one block.
  static constexpr int kPacks = kRows * kDim / 4 / kComputing;
  // The inputs of an item: the queries, with rows off the multiples of 32 banks, the key and value
  // of the token, the cosines and sines of its position, and the Item.
  static constexpr int kInputs = kDim > 128 ? 1 : 2;  // slots; with one, none is ahead
  static constexpr int kQueryStride = kDim + 8;
  static constexpr int kNewKey = 2 * kRows * kQueryStride, kNewValue = kNewKey + 2 * kDim;
  static constexpr int kAngles = kNewValue + 2 * kDim, kItem = kAngles + 8 * kDim;
  // In e4m3, bytes of the key and value, in the order of the cache, replace the angles.
  static constexpr int kKeyBytes = kAngles, kValueBytes = kKeyBytes + kDim;
  static constexpr int kInputBytes = kItem + 32;
  // After the stages: the inputs; O of a chunk, and its states; row maxima per warp, alpha,
  // barriers.
  static constexpr int kFirstInput = 2 * kStages * kTileBytes;
  static constexpr int kOutputs = kFirstInput + kInputs * kInputBytes;
  static constexpr int kStates = kOutputs + 4 * kRows * kDim;
  static constexpr int kMaxima = kStates + kRows * int{sizeof(ChunkState)};
  static constexpr int kAlphas = kMaxima + 4 * kWarps * kRows;
  static constexpr int kProbabilities = kAlphas + 4 * kRows;
  static constexpr int kBarriers = kProbabilities + (kIsE4m3 ? kProbabilityBytes : 0);
  // Boxes are aligned to 1 KiB, the period of the swizzle.
  static constexpr size_t kSharedBytes =
      1024 + kBarriers + Pipeline<kStages, 2>::kBytes + Pipeline<kInputs>::kBytes;
  static constexpr int kBlocksPerSm = std::min(kOneProducer && kDim == 64 ? 3 : 2,
                                               int{(228 << 10) / (kSharedBytes + 1024)});  // sm_90
};

// Byte offset of 8 columns of a row in a tile.
template <class Shape>
__device__ __forceinline__ uint32_t box_offset(int row, int chunk) {
  return static_cast<uint32_t>(((chunk / 8) * Shape::kKeys + row) * kRowBytes +
                               ((chunk % 8) ^ (row & 7)) * 16);
}

// The values of an item that only the device knows.
struct DecodeItem {
  int sequence, position;
  int64_t slot;            // cache slot of the token; negative if it has none
  float k_scale, v_scale;  // if the cache is in e4m3

  static __device__ DecodeItem load(const DecodeProblem& p, int item) {
    const int columns = p.kv_heads * p.parts, token = item / columns;
    // Prefetching reads must bypass L1, which may hold outdated data.
    DecodeItem out{__ldcg(p.sequences + token), __ldcg(p.positions + token), -1, 0, 0};
    if (p.scales != nullptr) {
      const float* const scale = p.scales + item % columns / p.parts;
      out.k_scale = __ldcg(scale);
      out.v_scale = __ldcg(scale + p.kv_heads);
    }
    if (out.is_active(p)) out.slot = p.table.slot(p.table.row(out.sequence), out.position);
    return out;
  }
  __device__ bool is_active(const DecodeProblem& p) const {
    return position >= 0 && p.table.has(sequence);
  }
};

// The rows of an item, and the tiles of its keys.
struct DecodeRows : DecodeItem {
  const bf16 *q, *k, *v;  // rows of this token
  bf16* o;
  const int32_t* blocks;  // block table row of the sequence; null: the token is idle
  int kv_head, first_head;
  bool is_first_part;
  int count;    // rows
  int end_key;  // end of the keys that the rows see
  IndexRange<int> tiles;

  template <class Problem>
  __device__ DecodeRows(const Problem& p, int index, const DecodeItem& item, int keys_per_tile)
      : DecodeItem(item) {
    // Items of a token are adjacent, as are its heads in memory.
    const int columns = p.kv_heads * p.parts, column = index % columns;
    const int64_t token = index / columns;
    const int group = p.heads / p.kv_heads;
    const int in_group = column % p.parts * 16;
    kv_head = column / p.parts;
    first_head = kv_head * group + in_group;
    is_first_part = column % p.parts == 0;
    const int64_t head = first_head;
    q = p.qkv + (token * (p.heads + 2 * p.kv_heads) + head) * p.head_dim;
    k = q + (p.heads + kv_head - head) * p.head_dim;
    v = k + p.kv_heads * p.head_dim;
    o = p.o + token * p.o_stride + head * p.head_dim;
    blocks = is_active(p) ? p.table.row(sequence) : nullptr;
    count = min(16, group - in_group);
    end_key = p.table.keys_of(position);
    tiles = IndexRange<int>{max(0, p.rule.first_key(end_key)), end_key}.tiles(keys_per_tile);
  }
  __device__ int head(int row) const { return first_head + min(row, count - 1); }
};

// Stages of a tile of keys, filled by producer 0, and one of values, by producer 1; and slots of
// the inputs of items, filled by producer 2 or by the single one.
template <class Shape>
struct DecodeStages {
  uint32_t base;
  Pipeline<Shape::kStages, 2> pipeline{base + Shape::kBarriers};
  Pipeline<Shape::kInputs> inputs{pipeline.end()};

  __device__ uint32_t tile(int stage, int producer) const {
    return base + (2 * stage + producer) * Shape::kTileBytes;
  }
};

// The chunks of an item, and the part of them that a block of a cluster computes.
template <class Shape>
struct DecodeChunks {
  int count = 0;   // 0: nothing to do: an idle token, or a single chunk, which is that of rank 0
  int blocks = 1;  // that share the chunks: a single chunk is computed by a single block
  int tile = 0;    // the block's first

  __device__ explicit DecodeChunks(const DecodeRows& rows) {
    if (rows.blocks == nullptr) return;
    const int rank = static_cast<int>(blockIdx.z), first = rows.tiles.first / Shape::kChunkTiles;
    const int chunks = (rows.tiles.end - 1) / Shape::kChunkTiles + 1 - first;
    if (chunks > 1) blocks = static_cast<int>(gridDim.z);
    if (rank >= blocks) return;
    count = chunks;
    tile = rank == 0 ? rows.tiles.first : (first + rank) * Shape::kChunkTiles;
  }
};

// Next tile of a block, whose chunks are `blocks` chunks apart.
template <class Shape>
__device__ __forceinline__ int next_tile(int tile, int blocks) {
  const bool ends_chunk = (tile + 1) % Shape::kChunkTiles == 0;
  return tile + 1 + (ends_chunk ? (blocks - 1) * Shape::kChunkTiles : 0);
}

// Producer warp of the keys (`producer` 0), or values (1), of the tiles that a block has of an
// item; a single producer loads both, each with half a warp, and that of inputs (2) none. `state`
// continues from item to item.
template <class Shape>
struct TileProducer {
  const CUtensorMap* map;
  const DecodeStages<Shape>& stages;
  ProducerState<Shape::kStages>& state;
  const DecodeProblem& problem;
  const DecodeRows& rows;
  const DecodeChunks<Shape> chunks{rows};
  static constexpr int kLanes = Shape::kOneProducer ? 16 : 32;
  // Each lane loads one box per tile, at fixed row and box column.
  const int lane = static_cast<int>(threadIdx.x % kLanes),
            boxes = Shape::kKeys / problem.box_tokens, row = lane % boxes * problem.box_tokens,
            column = lane / boxes;
  const bool loads_box = lane < boxes * (Shape::kIsE4m3 ? 1 : Shape::kDim / kBoxColumns);
  int block = -1;  // cache block of the lane's next box

  __device__ void load_tiles(int producer) {
    if (chunks.count == 0) return;
    const bool has_tiles = Shape::kOneProducer || producer < 2;
    int tile = chunks.tile;
    find_block(tile);
    for (int done = 0; done < chunks.count; done += chunks.blocks) {
      if (has_tiles && done + static_cast<int>(blockIdx.z) < chunks.count)
        tile = load_chunk_tiles(tile, producer);
      if (chunks.blocks == 1) continue;
      cluster_sync();
      cluster_sync();
    }
  }
  // Loads the tiles of one chunk, from `tile` on. Returns the next tile of the block.
  __device__ int load_chunk_tiles(int tile, int producer) {
    const int chunk = tile / Shape::kChunkTiles;
    while (tile < rows.tiles.end && tile / Shape::kChunkTiles == chunk) {
      const int in_block = (tile * Shape::kKeys + row) & (problem.table.block_tokens - 1);
      const TmaCoordinates from = box(in_block);
      tile = next_tile<Shape>(tile, chunks.blocks);
      find_block(tile);  // ahead of its use
      stages.pipeline.producer_acquire(state);
      const uint32_t full = stages.pipeline.full(state.index, producer);
      if (threadIdx.x % kLanes == 0) barrier_arrive_expect_tx(full, Shape::kTileBytes);
      __syncwarp();
      const uint32_t to = stages.tile(state.index, producer);
      const int offset =
          Shape::kIsE4m3 ? row * Shape::kDim : (column * Shape::kKeys + row) * kRowBytes;
      if (loads_box) tma_load(to + offset, map, from, full);
      state.advance();
    }
    return tile;
  }
  // The lane's box; outside the cache for a block that does not exist.
  __device__ TmaCoordinates box(int in_block) const {
    if constexpr (Shape::kIsE4m3) {
      const auto& table = problem.table;
      const bool exists = block >= 0 && block < table.blocks;
      const int page = exists ? (block * table.block_tokens + in_block) / kPageTokens : 0;
      return {{0, 0, 0, exists ? page * problem.kv_heads + rows.kv_head : -1}};
    } else {
      return {{column * kBoxColumns, rows.kv_head, in_block, block}};
    }
  }
  // Looks up the cache block of the lane. Block -1 is outside the cache and loads zeros.
  __device__ void find_block(int tile) {
    const int key = tile * Shape::kKeys + row;
    block = key < rows.end_key ? __ldcg(rows.blocks + (key >> problem.block_shift)) : -1;
  }
};

}  // namespace cohort::kernels::cuda
