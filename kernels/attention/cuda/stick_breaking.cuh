// Stick-breaking attention on CUDA, in the canonical order of stick_breaking.h: the parts that the
// forward, the paged and the backward kernels share. A warp has 16 query rows against the 64 keys
// of a tile. As in the accumulators of mma.m16n8k16, a thread has columns 2 quad and 2 quad + 1 of
// every 8 keys for two rows, so that the pairs of the canonical order are in one thread and a group
// of 8 keys is in a quad.
//
// The kernels are the same in both precisions; StickWarp has what differs. In bf16, tiles of rows
// are in shared memory and matmuls on tensor cores. In f32, which is not made for speed, a tile is
// a list of pointers to rows in global memory, and matmuls are fma chains over ascending indices.
#pragma once

#include "kernels/attention/cuda/backward_bf16.cuh"
#include "kernels/attention/cuda/forward.cuh"
#include "kernels/attention/stick_breaking_rule.h"

namespace cohort::kernels::cuda {
namespace {

constexpr int kStickKeys = kStickTile;

// Part of a row that a thread has: keys 8 n + 2 quad and the next.
using StickRow = float[kStickKeys / 8][2];
// Two rows, group and group + 8.
using StickScores = Accumulators<1, kStickKeys>;

// Replaces a row by the sums over the later keys of the tile, or over the earlier ones, and returns
// the sum of all.
template <bool kLater>
__device__ __forceinline__ float exclusive_sums(StickRow& values) {
  const int quad = static_cast<int>(threadIdx.x % 4);
  const bool adds_pair = quad % 2 == (kLater ? 0 : 1), adds_half = quad / 2 == (kLater ? 0 : 1);
  float total = 0;
#pragma unroll
  for (int i = 0; i < kStickKeys / 8; ++i) {
    float(&pair)[2] = values[kLater ? kStickKeys / 8 - 1 - i : i];
    const float own = pair[0] + pair[1], next = __shfl_xor_sync(0xffffffffu, own, 1);
    const float half = own + next, other = __shfl_xor_sync(0xffffffffu, half, 2);
    const float beyond = total + ((adds_pair ? next : 0.0f) + (adds_half ? other : 0.0f));
    const float both = beyond + (kLater ? pair[1] : pair[0]);
    pair[0] = kLater ? both : beyond;
    pair[1] = kLater ? beyond : both;
    total += half + other;
  }
  return total;
}

// fn(n, e, key) for the elements of a row in this thread.
template <class F>
__device__ __forceinline__ void for_row(F&& fn) {
  const int column = 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
  for (int n = 0; n < kStickKeys / 8; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) fn(n, e, 8 * n + column + e);
}

// A of row group + 8 r, which sees the first `end` keys of the tile, from its scores without the
// scale. The sum of L over the later tiles, `later`, then includes this one.
__device__ __forceinline__ void stick_weights(StickRow& a, const StickScores& s, int r,
                                              const StickRule<float>& rule, int end, float& later) {
  const auto exponent = [&](int n, int e) { return s[0][n][2 * r + e] * rule.exponent; };
  const auto more = [](float x) { return log2_one_plus(fast_exp2(-fabsf(x))); };
  for_row([&](int n, int e, int key) {
    const float x = exponent(n, e);
    a[n][e] = key < end ? fmaxf(x, 0.0f) + more(x) : 0.0f;
  });
  const float total = exclusive_sums<true>(a);
  for_row([&](int n, int e, int key) {
    const float x = exponent(n, e);
    a[n][e] = key < end ? fast_exp2(fminf(x, 0.0f) - more(x) - (a[n][e] + later)) : 0.0f;
  });
  later += total;
}

// Turns dA of row group + 8 r, in `da`, into dz. The sum of A dA over the earlier tiles, `earlier`,
// then includes this one.
__device__ __forceinline__ void stick_gradients(StickScores& da, const StickRow& a,
                                                const StickScores& s, int r,
                                                const StickRule<float>& rule, int end,
                                                float& earlier) {
  StickRow w;
  for_row([&](int n, int e, int key) {
    float& x = da[0][n][2 * r + e];
    x = w[n][e] = key < end ? __fmul_rn(a[n][e], x) : 0.0f;
  });
  const float total = exclusive_sums<false>(w);
  for_row([&](int n, int e, int key) {
    const float x = s[0][n][2 * r + e] * rule.exponent, t = fast_exp2(-fabsf(x));
    const float large = __fdividef(1.0f, 1.0f + t), small = t * large;
    const float beta = x >= 0 ? large : small, left = x >= 0 ? small : large;
    float& dz = da[0][n][2 * r + e];
    dz = key < end ? __fmaf_rn(left, dz, -__fmul_rn(beta, w[n][e] + earlier)) : 0.0f;
  });
  earlier += total;
}

// For load_tile().
template <int kDim_, int kWarps_>
struct StickShape {
  static constexpr int kDim = kDim_, kKeys = kStickKeys, kWarps = kWarps_;
};

// Operations of a warp on tiles, which are given by their offset in the shared memory of the block.
// kWidth: columns of its accumulators.
template <class T, int kDim, int kWidth, int kThreads>
struct StickWarp {
  static constexpr bool kFloat = std::is_same_v<T, float>;
  // Bytes of a row in a tile, and of a row of A or dz in shared memory.
  static constexpr int kRowBytes = kFloat ? 8 : 2 * kDim;
  static constexpr int kWeights = kFloat ? kStickKeys + 4 : kStickKeys;
  static constexpr int kWeightBytes = kWeights * static_cast<int>(sizeof(T));
  using Columns = Accumulators<1, kWidth>;
  // A or dz of 16 rows; in f32 they are in shared memory.
  struct NoRegisters {};
  using Weights = std::conditional_t<kFloat, NoRegisters, OperandA<1, kStickKeys>>;

  unsigned char* const shared;
  const RowFormat format;
  const int lane = static_cast<int>(threadIdx.x % 32), group = lane / 4, quad = lane % 4;
  const TileReader<kDim> reader = {};

  __device__ uint32_t address(int tile) const { return shared_address(shared + tile); }
  __device__ const T* const* pointers(int tile) const {
    return reinterpret_cast<const T* const*>(shared + tile);
  }

  // Starts loading `count` rows; row_of(r) is null for a row of zeros.
  template <class RowOf>
  __device__ __forceinline__ void load(int tile, int count, RowOf&& row_of) const {
    constexpr int kChunks = kFloat ? 1 : kDim / 8;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < count * kChunks; i += kThreads) {
      const T* const row = row_of(i / kChunks);
      if constexpr (kFloat)
        reinterpret_cast<const T**>(shared + tile)[i] = row;
      else
        load_chunk<kDim>(address(tile), i / kChunks, i % kChunks, row, format.head_dim,
                         format.vectorized);
    }
  }
  // Starts loading keys or values of `rows`, which are at `from`.
  template <class Rows>
  __device__ __forceinline__ void load_keys(int tile, const Rows& rows, const T* from,
                                            int index) const {
    if constexpr (kFloat)
      load(tile, kStickKeys, [&](int j) {
        const int64_t offset = rows.key_offset(index * kStickKeys + j);
        return offset < 0 ? nullptr : from + offset;
      });
    else
      load_tile<StickShape<kDim, kThreads / 32>>(rows, index, format,
                                                 TileLoad{from, address(tile)});
  }

  // Four elements of a row from column d on, zero beyond its end.
  __device__ Pack<float, 4> four(const float* row, int d) const {
    if (row != nullptr && format.vectorized) return load_pack<4>(row + d);
    Pack<float, 4> x{};
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (row != nullptr && d + e < format.head_dim) x.v[e] = row[d + e];
    return x;
  }

  // s = rows [row, row + 16) of tile `own` times the rows of tile `keys`.
  __device__ __forceinline__ void scores(StickScores& s, int own, int row, int keys) const {
    if constexpr (!kFloat) {
      cuda::scores<kDim, 1, kStickKeys>(s, reader, address(own) + row * kRowBytes, address(keys));
    } else {
      const float* const rows[2] = {pointers(own)[row + group], pointers(own)[row + group + 8]};
#pragma unroll
      for (int n0 = 0; n0 < kStickKeys / 8; n0 += 2) {  // four keys share loads of the rows
        const float* of_keys[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          of_keys[i] = pointers(keys)[8 * (n0 + i / 2) + 2 * quad + i % 2];
          s[0][n0 + i / 2][i % 2] = s[0][n0 + i / 2][2 + i % 2] = 0;
        }
#pragma unroll 1
        for (int d = 0; d < format.head_dim; d += 4) {
          const Pack<float, 4> a[2] = {four(rows[0], d), four(rows[1], d)};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const Pack<float, 4> b = four(of_keys[i], d);
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                float& sum = s[0][n0 + i / 2][2 * r + i % 2];
                sum = __fmaf_rn(a[r].v[e], b.v[e], sum);
              }
          }
        }
      }
    }
  }

  // Stores A or dz of row row + group + 8 r as elements of T in shared memory.
  __device__ __forceinline__ void put(int weights, int row, int r, const StickRow& values) const {
    const int at = row + group + 8 * r;
#pragma unroll
    for (int n = 0; n < kStickKeys / 8; ++n) {
      unsigned char* const to =
          shared + weights +
          (kFloat ? at * kWeightBytes + 32 * n + 8 * quad
                  : static_cast<int>(chunk_offset<kStickKeys>(at, n)) + 4 * quad);
      store_pack(reinterpret_cast<T*>(to),
                 Pack<T, 2>{from_float<T>(values[n][0]), from_float<T>(values[n][1])});
    }
  }
  // Variant that keeps it for accumulate().
  __device__ __forceinline__ void put(Weights& w, int weights, int row, int r,
                                      const StickRow& values) const {
    if constexpr (kFloat)
      put(weights, row, r, values);
    else
#pragma unroll
      for (int n = 0; n < kStickKeys / 8; ++n)
        w[0][n / 2][n % 2 * 2 + r] = pack_bf16(values[n][0], values[n][1]);
  }

  // sums += rows [row, row + 16) of A or dz times a tile of keys or values, of which the warp has
  // the columns from `column` on.
  __device__ __forceinline__ void accumulate(Columns& sums, const Weights& w, int weights, int row,
                                             int tile, int column) const {
    if constexpr (kFloat) {
      __syncwarp();
      accumulate_floats(sums, kStickKeys, tile, column, floats(weights) + (row + group) * kWeights,
                        8 * kWeights, 1);
      __syncwarp();
    } else {
      accumulate_matmul<kDim, kWidth, 1, kStickKeys>(sums, w, reader, address(tile) + 2 * column);
    }
  }
  // sums += columns [key, key + 16) of A or dz, which has kCount rows, times a tile of queries or
  // their dO.
  template <int kCount>
  __device__ __forceinline__ void accumulate_transposed(Columns& sums, int weights, int key,
                                                        int tile, int column) const {
    if constexpr (kFloat) {
      accumulate_floats(sums, kCount, tile, column, floats(weights) + key + group, 8, kWeights);
    } else {
      OperandA<1, kCount> a;
#pragma unroll
      for (int k = 0; k < kCount / 16; ++k)
        load_matrices_transposed(
            a[0][k], address(weights) + chunk_offset<kStickKeys>(16 * k + lane / 16 * 8 + lane % 8,
                                                                 key / 8 + lane / 8 % 2));
      accumulate_matmul<kDim, kWidth, 1, kCount>(sums, a, reader, address(tile) + 2 * column);
    }
  }

  __device__ const float* floats(int at) const {
    return reinterpret_cast<const float*>(shared + at);
  }
  // sums[r] += sum over the first `count` rows j of a tile of w[r r_step + j j_step] row j.
  __device__ __forceinline__ void accumulate_floats(Columns& sums, int count, int tile, int column,
                                                    const float* w, int r_step, int j_step) const {
#pragma unroll 1
    for (int j = 0; j < count; ++j) {
      const float* const from = pointers(tile)[j];
      const float of_rows[2] = {w[j * j_step], w[r_step + j * j_step]};
      for_columns(column, [&](int n, int e, int at) {
        const float x = from != nullptr && at < format.head_dim ? from[at] : 0.0f;
#pragma unroll
        for (int r = 0; r < 2; ++r)
          sums[0][n][2 * r + e] = __fmaf_rn(of_rows[r], x, sums[0][n][2 * r + e]);
      });
    }
  }

  // fn(n, e, column) for the columns of this thread.
  template <class F>
  __device__ __forceinline__ void for_columns(int column, F&& fn) const {
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) fn(n, e, column + 8 * n + 2 * quad + e);
  }

  // Stores, or adds to what is there, the sums times `scale`. row_of(i): output of row i of the
  // warp's 16; null: none.
  template <class RowOf>
  __device__ __forceinline__ void store(const Columns& sums, RowOf&& row_of, int column,
                                        float scale, bool accumulate) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      T* const to = row_of(group + 8 * r);
      if (to == nullptr) continue;
      for_columns(column, [&](int n, int e, int at) {
        if (at >= format.head_dim) return;
        // Adding +0 normalizes the sign of a zero.
        const float old = accumulate ? to_float(to[at]) : 0.0f;
        to[at] = from_float<T>(__fmaf_rn(sums[0][n][2 * r + e], scale, old));
      });
    }
  }
};

}  // namespace
}  // namespace cohort::kernels::cuda
