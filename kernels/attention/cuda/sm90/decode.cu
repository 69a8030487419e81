// attention_decode() in bf16 on sm_90. A decode step is bandwidth-bound with many sequences, and
// latency-bound with few.
//
// An item is one token and up to 16 query heads that share a key head; they are its rows. A block
// takes several items in turn. It rotates the queries and the new key, and loops over the tiles of
// keys of its chunks. The new key and value of the token go to the cache and, without waiting for
// that store, into their tile. Four consumer warps share the rows: each computes S and P for part
// of the keys of a tile and O for part of the head dim. They exchange the row max, P in f32 (for l,
// whose order is that of a single thread that sees all keys) and P in bf16 (for P V) through shared
// memory. Operands are loaded before the first mma of a chain, which would otherwise wait for each
// load in turn.
//
// Three producer warps run ahead of the consumers, into the next items: one loads the inputs of an
// item, and two load keys and values by TMA. There a lane requests a box of one cache block and 64
// columns, whose rows of 128 bytes are swizzled for ldmatrix. So the memory is busy while the
// consumers begin and end an item, whose look-ups and loads depend on each other.
//
// With few items, the blocks of a cluster share the chunks of the rows: block b takes chunks b,
// b + size, ... of the visible ones. After each round every block combines part of the elements of
// O, reading the chunks in ascending order from the shared memory of the other blocks. A single
// chunk needs a single block and no cluster barrier.
#include <bit>

#include "kernels/attention/cuda/sm90/decode_tiles.cuh"
#include "kernels/cuda/sm90/cluster.cuh"

namespace cohort::kernels::cuda {
namespace {

// Barrier of the consumer warps.
template <class Shape>
__device__ __forceinline__ void sync_computing() {
  asm volatile("bar.sync 1, %0;\n" ::"n"(Shape::kComputing) : "memory");
}

// State of a consumer warp. Within an item: its inputs and queries; within a chunk: rows `group`
// and `group` + 8 of O, its columns; partial sum l_part of l of row l_row, with lane % 16 = 4 row +
// part.
template <class Shape>
struct DecodeWarp {
  float row_max_log2[2], l, o[Shape::kColumnsPerWarp / 8][4];
  uint32_t q[Shape::kDim / 16][4];  // the rows' queries, for S
  char* shared;
  int inputs = 0;               // offset of the item's inputs
  uint32_t k_factor, v_factor;  // of dequantize(), in e4m3
  int warp, group, quad;
  int l_row, l_part;
  // Offsets of the lane's operand rows in a tile of keys, of values and in P: steps along a row
  // change the swizzled bits, other steps are added.
  uint32_t k_row, k_swizzle, v_row, v_swizzle, p_row, p_swizzle;

  __device__ explicit DecodeWarp(char* memory)
      : shared(memory),
        warp(static_cast<int>(threadIdx.x / 32)),
        group(static_cast<int>(threadIdx.x % 32 / 4)),
        quad(static_cast<int>(threadIdx.x % 4)),
        l_row(4 * warp + static_cast<int>(threadIdx.x % 16 / 4)),
        l_part(static_cast<int>(threadIdx.x % 4)) {
    const uint32_t lane = threadIdx.x % 32, warp_index = warp;
    p_row = Shape::kScoreBytes + lane % 16 * (2 * Shape::kKeys);
    p_swizzle = (lane / 16 ^ lane % 8) * 16;
    reset();
    if constexpr (Shape::kIsE4m3) {  // without a swizzle: word `quad` of row `group` of a matrix
      k_row = (warp_index * Shape::kKeysPerWarp) * Shape::kDim + 4 * lane;
      v_row = warp_index * Shape::kColumnsPerWarp * 16 + 4 * lane;
    } else {
      const uint32_t chunk = warp_index * (Shape::kColumnsPerWarp / 8) + lane / 16;
      k_row = (warp_index * Shape::kKeysPerWarp + lane / 16 * 8 + lane % 8) * kRowBytes;
      k_swizzle = (lane / 8 % 2 ^ lane % 8) * 16;
      v_row = (chunk / 8 * Shape::kKeys + lane % 16) * kRowBytes;
      v_swizzle = (chunk % 8 ^ lane % 8) * 16;
    }
  }
  // The memory of P, for a tile of keys.
  __device__ char* probabilities_of(char* keys) const {
    return Shape::kIsE4m3 ? shared + Shape::kProbabilities : keys;
  }
  __device__ float* floats(int offset) const { return reinterpret_cast<float*>(shared + offset); }

  __device__ void reset() {
    row_max_log2[0] = row_max_log2[1] = -INFINITY;
    l = 0;
#pragma unroll
    for (auto& n : o)
#pragma unroll
      for (float& x : n) x = 0;
  }

  // Rotates the queries of the rows and the key of the token in place. In e4m3 rounds the key and
  // value to bytes.
  __device__ void prepare(const DecodeRows& rows, const DecodeProblem& p) {
    if (p.rope.data != nullptr) {
      RopeTable angles = p.rope;
      angles.data = floats(inputs + Shape::kAngles);
      const int position = rows.position < p.rope.rows ? 0 : -1;
      angles.rows = 1;
      const int packs = p.head_dim / 16;  // half a row
      for (int i = static_cast<int>(threadIdx.x); i < (rows.count + 1) * packs;
           i += Shape::kComputing) {
        const int row = i / packs, column = i % packs * 8;
        const int offset = row < rows.count ? 2 * row * Shape::kQueryStride : Shape::kNewKey;
        bf16* const x = reinterpret_cast<bf16*>(shared + inputs + offset) + column;
        rotate<8>(x, x, {angles, position, column});
      }
      sync_computing<Shape>();
    }
    if constexpr (Shape::kIsE4m3) {
      k_factor = dequantize_factor(rows.scales[0]);
      v_factor = dequantize_factor(rows.scales[1]);
#pragma unroll 1
      for (int i = static_cast<int>(threadIdx.x); i < 2 * Shape::kDim; i += Shape::kComputing) {
        const int part = i / Shape::kDim, d = i % Shape::kDim;
        const auto* const from = reinterpret_cast<const bf16*>(shared + inputs + Shape::kNewKey);
        char* const to = shared + inputs + Shape::kKeyBytes + part * Shape::kDim;
        to[part == 0 ? d / 16 * 16 + cell_position(d % 16) : d] =
            static_cast<char>(E4m3Grid(rows.scales[part]).quantize(to_float(from[i])).bits);
      }
      sync_computing<Shape>();
    }
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int d = 0; d < Shape::kDim / 16; ++d)
      load_matrices(q[d], shared_address(shared) + inputs + lane % 16 * (2 * Shape::kQueryStride) +
                              32 * d + lane / 16 * 16);
  }
  // Writes the key and value of the token to the cache.
  __device__ void write_to_cache(const DecodeRows& rows, const DecodeProblem& p) const {
    if (Shape::kIsE4m3 && rows.slot >= 0) {
      const int64_t page = Pages{p.kv_heads, Shape::kDim}.page(rows.slot, rows.kv_head);
      const int t = static_cast<int>(rows.slot % kPageTokens);
      insert_key(static_cast<char*>(p.k_cache) + page, t);
      insert_value(static_cast<char*>(p.v_cache) + page, t);
    }
    const int column = 8 * static_cast<int>(threadIdx.x);
    if (Shape::kIsE4m3 || rows.slot < 0 || column >= p.head_dim) return;
    const int64_t at = (rows.slot * p.kv_heads + rows.kv_head) * p.head_dim + column;
    const auto* const row =
        reinterpret_cast<const bf16*>(shared + inputs + Shape::kNewKey) + column;
    store_raw(static_cast<bf16*>(p.k_cache) + at, load_raw<8>(row));
    store_raw(static_cast<bf16*>(p.v_cache) + at, load_raw<8>(row + Shape::kDim));
  }
  // Copies the key or value of the token into row `row` of a tile, or of a page.
  __device__ void insert_key(char* tile, int row) const {
    insert(tile, row, Shape::kNewKey);
  }
  __device__ void insert_value(char* tile, int row) const {
    if constexpr (Shape::kIsE4m3)
#pragma unroll 1
      for (int d = static_cast<int>(threadIdx.x); d < Shape::kDim; d += Shape::kComputing)
        tile[Pages::value(row, d, Shape::kDim)] = shared[inputs + Shape::kValueBytes + d];
    else
      insert(tile, row, Shape::kNewValue);
  }
  __device__ void insert(char* tile, int row, int from) const {
    const int chunk = static_cast<int>(threadIdx.x);
    if (chunk >= Shape::kDim * int{sizeof(typename Shape::Cache)} / 16) return;
    const int to = Shape::kIsE4m3 ? Pages::key_cell(row, chunk, Shape::kDim)
                                  : static_cast<int>(box_offset<Shape>(row, chunk));
    *reinterpret_cast<uint4*>(tile + to) = *reinterpret_cast<const uint4*>(
        shared + inputs + (Shape::kIsE4m3 ? Shape::kKeyBytes : from) + 16 * chunk);
  }
  // A word of a tile of pages: both registers of an operand of 8 keys or dims.
  static __device__ __forceinline__ uint32_t load_word(uint32_t from) {
    uint32_t word;
    asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(word) : "r"(from) : "memory");
    return word;
  }

  // S of the keys of the warp. Operands are loaded before the first mma that uses them.
  __device__ __forceinline__ void multiply_keys(float (&s)[2 * Shape::kGroupsPerWarp][4],
                                                uint32_t keys) const {
    constexpr int kGroups = Shape::kGroupsPerWarp, kSteps = Shape::kDim / 16;
#pragma unroll
    for (auto& n : s)
#pragma unroll
      for (float& x : n) x = 0;
    if constexpr (Shape::kIsE4m3) {
      constexpr int kAhead = 2;  // few, for fewer registers
#pragma unroll
      for (int first = 0; first < kSteps; first += kAhead) {
        uint32_t k[2 * kGroups][kAhead];
#pragma unroll
        for (int n = 0; n < 2 * kGroups; ++n)
#pragma unroll
          for (int d = 0; d < kAhead; ++d)
            k[n][d] = load_word(keys + k_row + n * (8 * Shape::kDim) + (first + d) * 128);
#pragma unroll
        for (int d = 0; d < kAhead; ++d)
#pragma unroll
          for (int n = 0; n < 2 * kGroups; ++n) {
            const uint2 b = dequantize(k[n][d], k_factor);
            mma_bf16(s[n], q[first + d], b.x, b.y);
          }
      }
    } else {
      uint32_t k[kGroups][kSteps][4];
#pragma unroll
      for (int d = 0; d < kSteps; ++d) {
        const uint32_t at =
            keys + k_row + d / 4 * (Shape::kKeys * kRowBytes) + (k_swizzle ^ d % 4 * 32);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) load_matrices(k[g][d], at + 16 * g * kRowBytes);
      }
#pragma unroll
      for (int d = 0; d < kSteps; ++d)
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          mma_bf16(s[2 * g], q[d], k[g][d][0], k[g][d][1]);
          mma_bf16(s[2 * g + 1], q[d], k[g][d][2], k[g][d][3]);
        }
    }
  }

  // Computes S of the keys of the warp, masked, and shares its row max. key0: first key of the
  // tile.
  template <class Rule>
  __device__ void scores(float (&s)[2 * Shape::kGroupsPerWarp][4], uint32_t keys, int key0,
                         const DecodeRows& rows, const Rule& rule) {
    const int first = warp * Shape::kKeysPerWarp, end = rows.end_key - key0;
    multiply_keys(s, keys);
    if constexpr (Rule::kModifies)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        modify_scores(s, rule.bind(0, rows.head(group + 8 * r), rows.end_key), r,
                      key0 + first + 2 * quad - rows.end_key + 1);
    if (end < Shape::kKeys || rule.first_key(end) > 0) {  // some keys of the tile are masked
#pragma unroll
      for (int n = 0; n < 2 * Shape::kGroupsPerWarp; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int key = first + 8 * n + 2 * quad + e % 2;
          if (rule.outside(key, end)) s[n][e] = -INFINITY;
        }
    }
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (const auto& n : s)
#pragma unroll
      for (int e = 0; e < 4; ++e) largest[e / 2] = fmaxf(largest[e / 2], n[e]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (8 * r >= rows.count) break;
      largest[r] = fmaxf(largest[r], __shfl_xor_sync(0xffffffffu, largest[r], 1));
      largest[r] = fmaxf(largest[r], __shfl_xor_sync(0xffffffffu, largest[r], 2));
      if (quad == 0) floats(Shape::kMaxima)[warp * Shape::kRows + group + 8 * r] = largest[r];
    }
  }

  // Computes P of the warp's keys, overwriting the keys of the tile (the TMA refills them later),
  // and rescales O. P, l and O of eight rows that do not exist are left undefined.
  __device__ void probabilities(const float (&s)[2 * Shape::kGroupsPerWarp][4], char* keys, float c,
                                int count) {
    auto* const exact = reinterpret_cast<float*>(keys) + group * Shape::kScoreStride +
                        warp * Shape::kKeysPerWarp + 2 * quad;
    const uint32_t rounded =
        shared_address(keys) + Shape::kScoreBytes + group * (2 * Shape::kKeys) + 4 * quad;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (8 * r >= count) break;
      const float* const maxima = floats(Shape::kMaxima) + group + 8 * r;
      float largest = maxima[0];
#pragma unroll
      for (int w = 1; w < Shape::kWarps; ++w) largest = fmaxf(largest, maxima[w * Shape::kRows]);
      const float new_max = fmaxf(row_max_log2[r], largest * c);
      const float safe_row_max = new_max == -INFINITY ? 0.0f : new_max;  // as in update_row_max()
      const float alpha = fast_exp2(row_max_log2[r] - safe_row_max);
      row_max_log2[r] = new_max;
      if (warp == 0 && quad == 0) floats(Shape::kAlphas)[group + 8 * r] = alpha;
#pragma unroll
      for (auto& n : o) {
        n[2 * r] *= alpha;
        n[2 * r + 1] *= alpha;
      }
#pragma unroll
      for (int n = 0; n < 2 * Shape::kGroupsPerWarp; ++n) {
        const uint32_t swizzled = ((warp * Shape::kKeysPerWarp / 8 + n) ^ group) * 16;
        const Pack<float, 2> p{fast_exp2(__fmaf_rn(s[n][2 * r], c, -safe_row_max)),
                               fast_exp2(__fmaf_rn(s[n][2 * r + 1], c, -safe_row_max))};
        store_pack(exact + 8 * r * Shape::kScoreStride + 8 * n, p);
        asm volatile(
            "st.shared.b32 [%0], %1;\n" ::"r"(rounded + swizzled + 8 * r * (2 * Shape::kKeys)),
            "r"(pack_bf16(p.v[0], p.v[1]))
            : "memory");
      }
    }
  }

  // Accumulates P of the tile's first 16 `groups` keys into l and O. Masked keys add zeros.
  __device__ void accumulate(const char* keys, uint32_t values, int groups) {
    const auto* const exact =
        reinterpret_cast<const float*>(keys) + l_row * Shape::kScoreStride + 2 * l_part;
    const uint32_t rounded = shared_address(keys) + p_row;
    l *= floats(Shape::kAlphas)[l_row];
    constexpr int kParts = !Shape::kIsE4m3 ? 1 : Shape::kDim == 128 ? 4 : 2;  // for fewer registers
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      accumulate_part<Shape::kGroups / kParts>(exact, rounded, values, part, groups);
  }
  template <int kGroups>
  __device__ __forceinline__ void accumulate_part(const float* exact, uint32_t rounded,
                                                  uint32_t values, int part, int groups) {
    // Words in e4m3, each of 8 dims; otherwise the registers of two operands.
    constexpr int kBlocks = Shape::kColumnsPerWarp / 8, kWords = Shape::kIsE4m3 ? 1 : 2;
    const int first = part * kGroups;
    Pack<float, 2> p[2 * kGroups];
    uint32_t a[kGroups][4], v[kGroups][kBlocks * kWords];
#pragma unroll
    for (int i = 0; i < 2 * kGroups; ++i) p[i] = load_pack<2>(exact + 8 * (2 * first + i));
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      load_matrices(a[g], rounded + (p_swizzle ^ (first + g) * 32));
      if constexpr (Shape::kIsE4m3) {
#pragma unroll
        for (int n = 0; n < kBlocks; ++n)
          v[g][n] = load_word(values + v_row + (first + g) * (16 * Shape::kDim) + n * 128);
      } else {
#pragma unroll
        for (int n = 0; n < kBlocks; n += 2)
          load_matrices_transposed(*reinterpret_cast<uint32_t(*)[4]>(&v[g][2 * n]),
                                   values + v_row + 16 * g * kRowBytes + (v_swizzle ^ n / 2 * 32));
      }
    }
#pragma unroll
    for (const auto& pair : p) {
      l += pair.v[0];
      l += pair.v[1];
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (Shape::kIsE4m3 && first + g >= groups) break;
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        if constexpr (Shape::kIsE4m3) {
          const uint2 b = dequantize(v[g][n], v_factor);
          mma_bf16(o[n], a[g], b.x, b.y);
        } else {
          mma_bf16(o[n], a[g], v[g][2 * n], v[g][2 * n + 1]);
        }
      }
    }
  }

  // Offset of pack `pack` of 4 columns of a row of O: packs of 8 columns are swizzled as in
  // CombinedChunks.
  static __device__ int o_offset(int row, int pack) {
    return row * Shape::kDim + 8 * ((pack / 2) ^ (row & 7)) + 4 * (pack % 2);
  }
  // Stores the chunk for the cluster to combine, and starts the next one.
  __device__ void store_chunk() {
    const float pair_sum = l + __shfl_xor_sync(0xffffffffu, l, 1);
    const float sum = pair_sum + __shfl_xor_sync(0xffffffffu, pair_sum, 2);
    auto* const states = reinterpret_cast<ChunkState*>(shared + Shape::kStates);
    if (threadIdx.x % 32 < 16 && l_part == 0) states[l_row].l = sum;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = group + 8 * r;
      if (warp == 0 && quad == 0) states[row].row_max_log2 = row_max_log2[r];
#pragma unroll
      for (int n = 0; n < Shape::kColumnsPerWarp / 8; ++n)
        store_pack(floats(Shape::kOutputs) +
                       o_offset(row, (warp * Shape::kColumnsPerWarp + 8 * n) / 4) + 2 * quad,
                   Pack<float, 2>{o[n][2 * r], o[n][2 * r + 1]});
    }
    reset();
  }
};

// A thread's slice of the combined O: block b of the cluster has the packs p of 4 columns with p /
// kThreads % blocks = b.
template <class Shape>
struct CombinedSlice {
  ChunkState states[Shape::kPacks];
  Pack<float, 4> o[Shape::kPacks];

  // Combines the chunk in the shared memory of block `from`; `first`: there is no previous chunk.
  __device__ void add_chunk(char* shared, int from, int blocks, bool first) {
#pragma unroll
    for (int i = 0; i < Shape::kPacks; ++i) {
      const int pack = pack_of(i, blocks), row = pack / (Shape::kDim / 4);
      if (row >= Shape::kRows) continue;
      const auto* const remote_state =
          in_block(reinterpret_cast<const float*>(shared + Shape::kStates), from) + 2 * row;
      const auto pair = load_pack<2>(remote_state);
      const ChunkState chunk{pair.v[0], pair.v[1]};
      const auto chunk_o =
          load_pack<4>(in_block(reinterpret_cast<const float*>(shared + Shape::kOutputs), from) +
                       DecodeWarp<Shape>::o_offset(row, pack % (Shape::kDim / 4)));
      if (first) {
        states[i] = chunk;
        o[i] = chunk_o;
        continue;
      }
      const CombineScales by = combine_scales(states[i], chunk);
      states[i] = combine(states[i], chunk, by);
#pragma unroll
      for (int e = 0; e < 4; ++e) o[i].v[e] = combine(o[i].v[e], chunk_o.v[e], by);
    }
  }

  template <class Rule>
  __device__ void store(const DecodeRows& rows, const Rule& rule, int head_dim, int blocks) const {
#pragma unroll
    for (int i = 0; i < Shape::kPacks; ++i) {
      const int pack = pack_of(i, blocks), row = pack / (Shape::kDim / 4);
      const int column = 4 * (pack % (Shape::kDim / 4)), at = row * head_dim + column;
      if (row >= rows.count || column >= head_dim) continue;
      const float factor =
          finish_row(rule, rows.head(row), states[i].row_max_log2, states[i].l).factor;
      Pack<bf16, 4> out;
#pragma unroll
      for (int e = 0; e < 4; ++e) out.v[e] = from_float<bf16>(o[i].v[e] * factor + 0.0f);
      store_pack(rows.o + at, out);
    }
  }

 private:
  static __device__ int pack_of(int i, int blocks) {
    return (i * blocks + static_cast<int>(blockIdx.z)) * Shape::kComputing +
           static_cast<int>(threadIdx.x);
  }
};

// Zeroes rows of values that no query sees: partly written cache blocks may hold anything there.
template <class Shape>
__device__ __forceinline__ void clear_values(char* values, int first) {
  constexpr int kChunks = Shape::kDim / 8;
  for (int i = static_cast<int>(threadIdx.x); i < (Shape::kKeys - first) * kChunks;
       i += Shape::kComputing)
    *reinterpret_cast<uint4*>(values + box_offset<Shape>(first + i / kChunks, i % kChunks)) =
        uint4{};
}
// Likewise for the last page of a tile in e4m3 that has keys, before key `end`; pages behind it are
// not read. Also writes the last key's value, unless `bytes` is null. A thread has the words of a
// dim and four keys.
template <class Shape>
__device__ __forceinline__ void finish_page(char* values, int end, const char* bytes) {
  auto* const page = reinterpret_cast<uint32_t*>(values) + (end - 1) / 16 * (4 * Shape::kDim);
  const int last = (end - 1) % 16;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < 4 * Shape::kDim; i += Shape::kComputing) {
    uint32_t word = page[i];
#pragma unroll
    for (int byte = 0; byte < 4; ++byte) {  // of keys 8, 0, 9 and 1 from the word's first on
      const int key = 2 * (i % 4) + byte / 2 + (byte % 2 == 0 ? 8 : 0);
      if (key > last || (key == last && bytes != nullptr)) word &= ~(0xffu << 8 * byte);
      if (key == last && bytes != nullptr)
        word |= uint32_t{static_cast<uint8_t>(bytes[i / 4])} << 8 * byte;
    }
    page[i] = word;
  }
}

// Processes the tiles of one chunk, from `tile` on. Returns the next tile of the block.
template <class Shape, class Rule>
__device__ __forceinline__ int decode_chunk(DecodeWarp<Shape>& warp,
                                            const DecodeStages<Shape>& stages,
                                            PipelineState<Shape::kStages>& state,
                                            const DecodeRows& rows, const Rule& rule, int tile,
                                            int blocks) {
  const int chunk = tile / Shape::kChunkTiles;
#pragma unroll 1
  for (; tile < rows.tiles.end && tile / Shape::kChunkTiles == chunk;
       tile = next_tile<Shape>(tile, blocks)) {
    const int key0 = tile * Shape::kKeys;
    const uint32_t key_tile = stages.tile(state.index, 0), value_tile = stages.tile(state.index, 1);
    char* const keys = warp.shared + (key_tile - stages.base);
    // The last key is that of the token itself, if the cache has a slot for it.
    const int new_row = rows.slot >= 0 && tile == rows.tiles.end - 1 ? rows.end_key - 1 - key0 : -1;
    stages.pipeline.consumer_wait(state, 0);
    if (new_row >= 0) {
      warp.insert_key(keys, new_row);
      sync_computing<Shape>();
    }
    float s[2 * Shape::kGroupsPerWarp][4];
    warp.scores(s, key_tile, key0, rows, rule);
    sync_computing<Shape>();
    warp.probabilities(s, warp.probabilities_of(keys), rule.exponent, rows.count);
    stages.pipeline.consumer_wait(state, 1);
    char* const values = keys + Shape::kTileBytes;
    const int end = min(Shape::kKeys, rows.end_key - key0);
    if constexpr (Shape::kIsE4m3) {
      if (new_row >= 0 || end % 16 != 0)
        finish_page<Shape>(values, end,
                           new_row < 0 ? nullptr : warp.shared + warp.inputs + Shape::kValueBytes);
    } else {
      if (end < Shape::kKeys) clear_values<Shape>(values, end);
      if (new_row >= 0) warp.insert_value(values, new_row);
    }
    sync_computing<Shape>();
    warp.accumulate(warp.probabilities_of(keys), value_tile, (end + 15) / 16);
    stages.pipeline.consumer_release_fenced(state);
    state.advance();
  }
  return tile;
}

// Computes the block's part of an item.
template <class Shape, class Problem>
__device__ __forceinline__ void decode(DecodeWarp<Shape>& warp, const DecodeStages<Shape>& stages,
                                       PipelineState<Shape::kStages>& state, const DecodeRows& rows,
                                       const Problem& problem) {
  auto [chunks, blocks, tile] = DecodeChunks<Shape>(rows);
  const auto rank = static_cast<int>(blockIdx.z);
  if (rows.blocks == nullptr && rank == 0)
    for (int i = static_cast<int>(threadIdx.x); i < rows.count * problem.head_dim;
         i += Shape::kComputing)
      rows.o[i] = from_float<bf16>(0.0f);
  if (chunks == 0) return;
  warp.prepare(rows, problem);
  const bool has_last = (chunks - 1) % blocks == rank;
  if (has_last && rows.is_first_part) warp.write_to_cache(rows, problem);
  CombinedSlice<Shape> slice;
#pragma unroll 1
  for (int done = 0; done < chunks; done += blocks) {
    if (done + rank < chunks) {
      tile = decode_chunk(warp, stages, state, rows, problem.rule, tile, blocks);
      warp.store_chunk();
    }
    blocks > 1 ? cluster_sync() : sync_computing<Shape>();
    for (int from = 0; from < min(blocks, chunks - done); ++from)
      slice.add_chunk(warp.shared, from, blocks, done + from == 0);
    // Shared memory may be reused, also by the next item, or freed only after all blocks have read
    // it.
    blocks > 1 ? cluster_sync() : sync_computing<Shape>();
  }
  slice.store(rows, problem.rule, problem.head_dim, blocks);
}

// Loads the block's tiles of an item.
template <class Shape>
__device__ __forceinline__ void produce(const CUtensorMap* map, int producer,
                                        const DecodeStages<Shape>& stages,
                                        ProducerState<Shape::kStages>& state,
                                        const DecodeRows& rows, const DecodeProblem& problem) {
  const DecodeChunks<Shape> chunks(rows);
  if (chunks.count == 0) return;
  TileProducer<Shape> tiles(map, stages, state, problem, rows, chunks);
  int tile = chunks.tile;
  for (int done = 0; done < chunks.count; done += chunks.blocks) {
    if (done + static_cast<int>(blockIdx.z) < chunks.count)
      tile = tiles.load_chunk_tiles(tile, producer);
    if (chunks.blocks == 1) continue;
    cluster_sync();
    cluster_sync();
  }
}

// A producer warp loads the inputs of an item, a row of them per lane. Columns beyond the head dim
// stay zero, because loads and rotations write head_dim columns; rows beyond the last may hold
// anything.
template <class Shape>
__device__ __forceinline__ void load_inputs(const DecodeStages<Shape>& stages, char* shared,
                                            const DecodeProblem& p, const DecodeRows& rows,
                                            const DecodeRows::Item& item,
                                            ProducerState<Shape::kInputs>& state, bool is_first) {
  const int lane = static_cast<int>(threadIdx.x % 32), row_bytes = 2 * p.head_dim;
  const int angle_bytes = p.rope.data == nullptr ? 0 : (p.rope.wide ? 8 : 4) * p.head_dim;
  const int offset = Shape::kFirstInput + state.index * Shape::kInputBytes;
  const bool has_angles = rows.position < p.rope.rows;
  const void* from = nullptr;
  int to = 0, bytes = row_bytes;
  if (lane < rows.count) {
    from = rows.q + lane * p.head_dim;
    to = 2 * lane * Shape::kQueryStride;
  } else if (lane == Shape::kRows || lane == Shape::kRows + 1) {
    from = lane == Shape::kRows ? rows.k : rows.v;
    to = lane == Shape::kRows ? Shape::kNewKey : Shape::kNewValue;
  } else if (lane == Shape::kRows + 2 && angle_bytes > 0 && has_angles) {
    from = p.rope.data + int64_t{rows.position} * (angle_bytes / 4);
    to = Shape::kAngles;
    bytes = angle_bytes;
  }
  stages.inputs.producer_acquire(state);
  // Item::load() has read inputs that may be prefetched (kernels/common.h); qkv is none.
  if (is_first) wait_on_dependent_grids();
  const bool loads = rows.blocks != nullptr;
  if (lane == 0) {
    *reinterpret_cast<DecodeRows::Item*>(shared + offset + Shape::kItem) = item;
    stages.inputs.producer_commit_expect_tx(
        state, loads ? (rows.count + 2) * row_bytes + (has_angles ? angle_bytes : 0) : 0);
  }
  __syncwarp();
  if (loads && from != nullptr)
    bulk_load(stages.base + offset + to, from, bytes, stages.inputs.full(state.index));
  state.advance();
  __syncwarp();
}
template <class Shape>
__device__ __forceinline__ void clear_inputs(char* shared) {
  for (int i = static_cast<int>(threadIdx.x % 32); i < Shape::kInputs * Shape::kInputBytes / 16;
       i += 32)
    reinterpret_cast<uint4*>(shared + Shape::kFirstInput)[i] = uint4{};
  fence_proxy_async();
  __syncwarp();
}

// Producer warp of keys (0), values (1), inputs (2), or of everything (negative). Loads those of
// the block's items, `stride` apart.
template <class Shape, class Problem>
__device__ __forceinline__ void run_producer(int producer, const CUtensorMap* map,
                                             const DecodeStages<Shape>& stages, char* shared,
                                             const Problem& problem, int first, int stride) {
  const bool loads_inputs = Shape::kOneProducer || producer == 2,
             loads_tiles = Shape::kOneProducer || producer != 2;
  ProducerState<Shape::kStages> state;
  ProducerState<Shape::kInputs> inputs;
  if (loads_inputs) clear_inputs<Shape>(shared);
#pragma unroll 1
  for (int index = first; index < problem.items; index += stride) {
    const auto item = DecodeRows::Item::load(problem, index);
    const DecodeRows rows(problem, index, item, Shape::kKeys);
    if (loads_inputs) load_inputs(stages, shared, problem, rows, item, inputs, index == first);
    if (loads_tiles)
      produce(map, producer, stages, state, rows, problem);
    else
      DecodeChunks<Shape>(rows).sync_rounds();
  }
}

template <class Shape, class Problem>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    attention_decode_kernel(const __grid_constant__ Problem problem,
                            const __grid_constant__ CUtensorMap k,
                            const __grid_constant__ CUtensorMap v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ char memory[];
  char* const shared = memory + (1024 - shared_address(memory) % 1024) % 1024;
  const int thread = static_cast<int>(threadIdx.x);
  const DecodeStages<Shape> stages{shared_address(shared)};
  if (thread < Shape::kStages) stages.pipeline.init_stage(thread, 1, Shape::kWarps);
  if (thread < Shape::kInputs) stages.inputs.init_stage(thread, 1, Shape::kWarps);
  // Negative: none. A single producer has keys in its first half and values in its second one.
  const int producer = Shape::kOneProducer ? (thread - Shape::kComputing) / 16
                                           : uniform(thread - Shape::kComputing) / 32;
  const CUtensorMap* const map = producer == 0 ? &k : &v;
  if (thread % 16 == 0 && thread >= Shape::kComputing) tma_prefetch(map);
  __syncthreads();
  launch_dependent_grids();
  if (thread < Shape::kComputing || !problem.may_prefetch) wait_on_dependent_grids();
  const int first = static_cast<int>(blockIdx.x), stride = static_cast<int>(gridDim.x);
  if (thread < Shape::kComputing) {
    PipelineState<Shape::kStages> state;
    PipelineState<Shape::kInputs> input;
    DecodeWarp<Shape> warp(shared);
#pragma unroll 1
    for (int index = first; index < problem.items; index += stride) {
      warp.inputs = Shape::kFirstInput + input.index * Shape::kInputBytes;
      stages.inputs.consumer_wait(input);
      const auto item =
          *reinterpret_cast<const DecodeRows::Item*>(shared + warp.inputs + Shape::kItem);
      decode(warp, stages, state, {problem, index, item, Shape::kKeys}, problem);
      stages.inputs.consumer_release_fenced(input);
      input.advance();
    }
  } else {
    run_producer<Shape>(producer, map, stages, shared, problem, first, stride);
  }
#endif
}

// Tensor map of keys or values [blocks, block_tokens, Hkv, D], or of the pages of one of them.
CUtensorMap make_cache_map(const Tensor& t, int box_tokens) {
  const auto size = [&](int i) { return static_cast<cuuint64_t>(t.dim(i)); };
  if (t.dtype() == DType::kE4M3) {
    const cuuint64_t rows = size(3) / 8, page = kPageTokens * size(3);
    return make_tensor_map({.t = t,
                            .sizes = {128, rows, 1, size(0) * size(1) / kPageTokens * size(2)},
                            .strides = {128, page, page},
                            .box = {128, static_cast<cuuint32_t>(rows), 1, 1}});
  }
  const cuuint64_t head = size(3) * sizeof(bf16), token = size(2) * head, block = size(1) * token;
  return make_tensor_map({.t = t,
                          .sizes = {size(3), size(2), size(1), size(0)},
                          .strides = {head, token, block},
                          .box = {kBoxColumns, 1, static_cast<cuuint32_t>(box_tokens), 1}});
}

// Runs the kernel with clusters of up to `cluster` blocks. Returns false if it does not fit the
// device.
template <class Shape, class Problem>
bool run(const AttentionDecode& args, const Problem& problem, int cluster) {
  const Device device = args.o.device();
  const auto kernel = attention_decode_kernel<Shape, Problem>;
  const auto* const code = reinterpret_cast<const void*>(kernel);
  constexpr KernelNeeds kNeeds{.shared_memory = Shape::kSharedBytes, .compute_capability = 90};
  if (!::cohort::cuda::fits(code, kNeeds, device)) return false;
  while (cluster > 1 && ::cohort::cuda::active_clusters(code, cluster, Shape::kThreads,
                                                        Shape::kSharedBytes, device) == 0)
    cluster /= 2;
  const auto size = static_cast<unsigned>(cluster);
  const int resident =
      ::cohort::cuda::gpu_properties(device).multiprocessors * Shape::kBlocksPerSm / cluster;
  launch("attention_decode", kernel,
         {.grid = dim3(blocks_for(std::min(std::max(resident, 1), problem.items), 1), 1, size),
          .block = Shape::kThreads,
          .shared_bytes = Shape::kSharedBytes,
          .start = Start::kProgrammatic,
          .cluster = dim3(1, 1, size)},
         device, problem, make_cache_map(args.cache.k, problem.box_tokens),
         make_cache_map(args.cache.v, problem.box_tokens));
  return true;
}

// True if the kernel supports the call: bf16 with a cache in bf16 or e4m3, half heads of a multiple
// of 16 bytes, cache blocks of 8, 16, 32, ... tokens (8 rows are the period of the swizzle), no
// tile mask.
bool supports(const AttentionDecode& args) {
  const Tensor& cache = args.cache.k;
  const auto block = static_cast<uint64_t>(cache.dim(1));
  return args.qkv.dtype() == DType::kBF16 && cache.numel() > 0 && cache.dim(3) % 16 == 0 &&
         block >= 8 && std::has_single_bit(block) && !args.desc.tiles.defined() &&
         vectorized_heads<bf16>(args.o) &&
         aligned(pointer<bf16>(args.qkv), pointer<char>(cache), pointer<char>(args.cache.v),
                 pointer<float>(args.table));
}

}  // namespace

bool attention_decode(const AttentionDecode& args) {
  if (!supports(args)) return false;
  const int64_t tokens = args.o.dim(0), heads = args.o.dim(1), dim = args.o.dim(2),
                block = args.cache.k.dim(1), kv_heads = args.cache.k.dim(2);
  const int64_t parts = (heads / kv_heads + 15) / 16, items = tokens * kv_heads * parts;
  COHORT_CHECK(items < (1 << 28), "[attention_decode] too many tokens and heads: ", args.o.str());
  const bool is_e4m3 = args.cache.k.dtype() == DType::kE4M3;
  DecodeProblem problem{
      .qkv = pointer<bf16>(args.qkv),
      .o = pointer<bf16>(args.o),
      .k_cache = pointer<void>(args.cache.k),
      .v_cache = pointer<void>(args.cache.v),
      .scales = pointer<float>(args.cache.scales),
      .sequences = pointer<int32_t>(args.sequences),
      .positions = pointer<int32_t>(args.positions),
      .table = page_table(args.cache),
      .rope = RopeTable(args.table, dim),
      .o_stride = args.o.strides()[0],
      .heads = static_cast<int>(heads),
      .kv_heads = static_cast<int>(kv_heads),
      .head_dim = static_cast<int>(dim),
      .parts = static_cast<int>(parts),
      .items = static_cast<int>(items),
      .block_shift = std::countr_zero(static_cast<uint64_t>(block)),
      .box_tokens = static_cast<int>(is_e4m3 ? kPageTokens : std::min(block, attention_tile(dim))),
      .may_prefetch = current_stream(args.o.device()).may_prefetch};
  const int multiprocessors = ::cohort::cuda::gpu_properties(args.o.device()).multiprocessors;
  // Blocks share the chunks of an item while that leaves each block its own multiprocessor.
  constexpr int kMaxClusterSize = 8;  // portable maximum
  const int64_t chunks = (problem.table.capacity() + kAttentionChunk - 1) / kAttentionChunk;
  int cluster = 1;
  while (cluster < kMaxClusterSize && cluster < chunks &&
         2 * problem.items * cluster <= multiprocessors)
    cluster *= 2;
  // With few blocks, more stages per block; with many, more blocks per multiprocessor.
  bool ran = false;
  const auto run_in = [&]<class C>(const auto& call) {
    dispatch_head_dim(dim, [&]<int kDim>() {
      // Few items: more stages per block, instead of several blocks per multiprocessor. In e4m3,
      // whose loads take half the time, more blocks hide the latency of the arithmetic.
      constexpr bool kIsE4m3 = sizeof(C) == 1;
      constexpr int kProducers = kIsE4m3 && kDim <= 128 ? 1 : 3;
      constexpr int kStages = !kIsE4m3 || kDim == 64 ? 3 : kDim == 128 ? 2 : 5;
      if constexpr (kDim == 64 || kProducers == 1)
        if (problem.items * cluster <= multiprocessors) {
          ran = run<DecodeShape<C, kDim, kDim == 64 ? 6 : 5>>(args, call, cluster);
          return;
        }
      ran = run<DecodeShape<C, kDim, kStages, kProducers>>(args, call, cluster);
    });
  };
  const auto run_with = [&](const auto& call) {
    is_e4m3 ? run_in.template operator()<uint8_t>(call) : run_in.template operator()<bf16>(call);
  };
  with_rule<WindowRule<float>, ModifyRule<float>>(problem, args.desc, dim, tokens, run_with);
  return ran;
}

}  // namespace cohort::kernels::cuda
