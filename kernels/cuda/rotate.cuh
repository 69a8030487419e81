// Rotation of N adjacent pairs of a head: N elements of its first half with those of its second
// half. Shared by rope() and the kernels that write keys to the cache, so their results are bitwise
// equal.
#pragma once

#include <algorithm>

#include "kernels/cuda/raw.cuh"

namespace cohort::kernels::cuda {

// rope_table() that rotates the first R = 2 half elements of a head: rows of R elements, the
// cosines of all pairs and then the sines, or wide ones of 2 R, with those of the first and of the
// second half of the result.
struct RopeTable {
  const float* data = nullptr;  // null: no rotation
  int64_t rows = 0;
  int half = 0;
  bool wide = false;

  RopeTable() = default;
  // `table` may be undefined.
  RopeTable(const Tensor& table, int64_t head_dim) : half(static_cast<int>(head_dim / 2)) {
    if (!table.defined()) return;
    half = static_cast<int>(std::min(table.dim(1), head_dim) / 2);
    data = pointer<float>(table);
    rows = table.dim(0);
    wide = table.dim(1) == 2 * head_dim;
  }
};

// Cosines and sines of pairs [pair, pair + N) at a position, of these parts of a wide row. A
// position outside the table gives NaN, because a wrong row would go unnoticed.
template <int N, bool kWide = false>
struct Angles {
  float cos[N], sin[N];

  __device__ __forceinline__ Angles(const RopeTable& table, int position, int pair,
                                    int cos_part = 0, int sin_part = 0) {
#pragma unroll
    for (int n = 0; n < N; ++n) cos[n] = sin[n] = NAN;
    if (position < 0 || position >= table.rows) return;
    const int dim = 2 * table.half;
    const float* row = table.data + int64_t{position} * (kWide ? 2 : 1) * dim + pair;
    load_floats(row + (kWide ? cos_part * dim : 0), cos);
    load_floats(row + (kWide ? sin_part * dim : 0) + table.half, sin);
  }
};

// The rotation of pairs from `pair` on to a position.
struct RopeAt {
  const RopeTable& table;
  int position, pair;
};

// Rotates x, N pairs at offsets 0 and half, and calls store(offset, elements) with the results of
// each half. sign: 1, or -1 for the transpose, in which the parts of a wide table exchange their
// sines.
template <int N, bool kWide, class T, class Store>
__device__ __forceinline__ void rotate(const T* x, const RopeAt& at, float sign,
                                       const Store& store) {
  const auto& [table, position, pair] = at;
  const int half = table.half;
  // Both halves are loaded before either is stored, which may be in their place.
  const auto first = load_raw<N>(x), second = load_raw<N>(x + half);
  float out[2][N];
  if constexpr (kWide) {
    // One part at a time, for fewer registers.
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
      const Angles<N, true> angles(table, position, pair, part, sign > 0 ? part : 1 - part);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float a = element(first, n), b = element(second, n), s = sign * angles.sin[n];
        out[0][n] = part == 0 ? a * angles.cos[n] - b * s : b * angles.cos[n] + a * s;
      }
      store(part * half, out[0]);
    }
  } else {
    const Angles<N> angles(table, position, pair);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float a = element(first, n), b = element(second, n), s = sign * angles.sin[n];
      out[0][n] = a * angles.cos[n] - b * s;
      out[1][n] = b * angles.cos[n] + a * s;
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) store(part * half, out[part]);
  }
}
// Variant for tables of either width, without the transpose.
template <int N, class T, class Store>
__device__ __forceinline__ void rotate(const T* x, const RopeAt& at, const Store& store) {
  if (at.table.wide)
    rotate<N, true>(x, at, 1.0f, store);
  else
    rotate<N, false>(x, at, 1.0f, store);
}

}  // namespace cohort::kernels::cuda
