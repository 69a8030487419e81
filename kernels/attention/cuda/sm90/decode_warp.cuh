// The consumer warps of decode.cu: the arithmetic of an item's tiles of keys and values.
#pragma once

#include "kernels/attention/cuda/sm90/decode_tiles.cuh"

namespace cohort::kernels::cuda {

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
  uint32_t k_factor, v_factor;  // for dequantize(), in e4m3
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
      const int packs = p.rope.half / 8;  // in half a row
      for (int i = static_cast<int>(threadIdx.x); i < (rows.count + 1) * packs;
           i += Shape::kComputing) {
        const int row = i / packs, column = i % packs * 8;
        const int offset = row < rows.count ? 2 * row * Shape::kQueryStride : Shape::kNewKey;
        bf16* const x = reinterpret_cast<bf16*>(shared + inputs + offset) + column;
        rotate<8>(x, {angles, position, column},
                  [&](int half, float(&y)[8]) { store_raw(x + half, to_raw<bf16>(y)); });
      }
      sync_computing<Shape>();
    }
    if constexpr (Shape::kIsE4m3) {
      k_factor = dequantize_factor(rows.k_scale);
      v_factor = dequantize_factor(rows.v_scale);
#pragma unroll 1
      for (int i = static_cast<int>(threadIdx.x); i < 2 * Shape::kDim; i += Shape::kComputing) {
        const int part = i / Shape::kDim, d = i % Shape::kDim;
        const auto* const from = reinterpret_cast<const bf16*>(shared + inputs + Shape::kNewKey);
        char* const to = shared + inputs + Shape::kKeyBytes + part * Shape::kDim;
        const E4m3Grid grid(part == 0 ? rows.k_scale : rows.v_scale);
        to[part == 0 ? d / 16 * 16 + cell_position(d % 16) : d] =
            static_cast<char>(grid.quantize(to_float(from[i])).bits);
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
      insert(static_cast<char*>(p.k_cache) + page, t, Shape::kKeyBytes);
#pragma unroll 1
      for (int d = static_cast<int>(threadIdx.x); d < Shape::kDim; d += Shape::kComputing)
        static_cast<char*>(p.v_cache)[page + Pages::value(t, d, Shape::kDim)] =
            shared[inputs + Shape::kValueBytes + d];
    }
    const int column = 8 * static_cast<int>(threadIdx.x);
    if (Shape::kIsE4m3 || rows.slot < 0 || column >= p.head_dim) return;
    const int64_t at = (rows.slot * p.kv_heads + rows.kv_head) * p.head_dim + column;
    const auto* const row =
        reinterpret_cast<const bf16*>(shared + inputs + Shape::kNewKey) + column;
    store_raw(static_cast<bf16*>(p.k_cache) + at, load_raw<8>(row));
    store_raw(static_cast<bf16*>(p.v_cache) + at, load_raw<8>(row + Shape::kDim));
  }
  // Copies the key or value of the token, which is at `from` of its inputs, into row `row` of a
  // tile; in e4m3 the key, also into a page.
  __device__ void insert(char* tile, int row, int from) const {
    const int chunk = static_cast<int>(threadIdx.x);
    if (chunk >= Shape::kDim * int{sizeof(typename Shape::Cache)} / 16) return;
    const int to = Shape::kIsE4m3 ? Pages::key_cell(row, chunk, Shape::kDim)
                                  : static_cast<int>(box_offset<Shape>(row, chunk));
    *reinterpret_cast<uint4*>(tile + to) =
        *reinterpret_cast<const uint4*>(shared + inputs + from + 16 * chunk);
  }
  // A load from a tile of keys or values gives in e4m3 a word for a block of 8 keys or dims, and in
  // bf16 the registers of operand B for two blocks.
  static constexpr int kBlocksPerLoad = Shape::kIsE4m3 ? 1 : 2;
  using Words = uint32_t[Shape::kIsE4m3 ? 1 : 4];
  // Operand B of block n.
  static __device__ __forceinline__ uint2 operand(const Words* words, int n, uint32_t factor) {
    if constexpr (Shape::kIsE4m3)
      return dequantize(words[n][0], factor);
    else
      return {words[n / 2][n % 2 * 2], words[n / 2][n % 2 * 2 + 1]};
  }
  static __device__ __forceinline__ uint32_t load_word(uint32_t from) {
    uint32_t word;
    asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(word) : "r"(from) : "memory");
    return word;
  }

  // S of the keys of the warp. Operands are loaded before the first mma that uses them; in e4m3 few
  // at a time, for fewer registers.
  __device__ __forceinline__ void multiply_keys(float (&s)[2 * Shape::kGroupsPerWarp][4],
                                                uint32_t keys) const {
    constexpr int kBlocks = 2 * Shape::kGroupsPerWarp, kSteps = Shape::kDim / 16;
    constexpr int kAhead = Shape::kIsE4m3 ? 2 : kSteps;
#pragma unroll
    for (auto& n : s)
#pragma unroll
      for (float& x : n) x = 0;
#pragma unroll
    for (int first = 0; first < kSteps; first += kAhead) {
      Words k[kAhead][kBlocks / kBlocksPerLoad];
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
#pragma unroll
        for (int n = 0; n < kBlocks / kBlocksPerLoad; ++n) {
          const int d = first + i;
          if constexpr (Shape::kIsE4m3)
            k[i][n][0] = load_word(keys + k_row + n * (8 * Shape::kDim) + d * 128);
          else
            load_matrices(k[i][n], keys + k_row + d / 4 * (Shape::kKeys * kRowBytes) +
                                       (k_swizzle ^ d % 4 * 32) + 16 * n * kRowBytes);
        }
#pragma unroll
      for (int i = 0; i < kAhead; ++i)
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          const uint2 b = operand(k[i], n, k_factor);
          mma_bf16(s[n], q[first + i], b.x, b.y);
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
    constexpr int kGroups = Shape::kGroups / kParts, kBlocks = Shape::kColumnsPerWarp / 8;
#pragma unroll
    for (int first = 0; first < Shape::kGroups; first += kGroups) {
      Pack<float, 2> p[2 * kGroups];
      uint32_t a[kGroups][4];
      Words v[kGroups][kBlocks / kBlocksPerLoad];
#pragma unroll
      for (int i = 0; i < 2 * kGroups; ++i) p[i] = load_pack<2>(exact + 8 * (2 * first + i));
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        load_matrices(a[g], rounded + (p_swizzle ^ (first + g) * 32));
#pragma unroll
        for (int n = 0; n < kBlocks / kBlocksPerLoad; ++n)
          if constexpr (Shape::kIsE4m3)
            v[g][n][0] = load_word(values + v_row + (first + g) * (16 * Shape::kDim) + n * 128);
          else
            load_matrices_transposed(v[g][n],
                                     values + v_row + 16 * g * kRowBytes + (v_swizzle ^ n * 32));
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
          const uint2 b = operand(v[g], n, v_factor);
          mma_bf16(o[n], a[g], b.x, b.y);
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

}  // namespace cohort::kernels::cuda
