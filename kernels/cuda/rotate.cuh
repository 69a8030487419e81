// Rotation of N adjacent pairs of a head: N elements of its first half with those of its second
// half. Shared by rope() and the kernels that write keys to the cache, so their results are bitwise
// equal.
#pragma once

#include "kernels/cuda/raw.cuh"

namespace cohort::kernels::cuda {

// Rotary table [rows, 2 half]: the cosines of all pairs, then the sines.
struct RopeTable {
  const float* data = nullptr;  // null: no rotation
  int64_t rows = 0;
  int half = 0;

  RopeTable() = default;
  // From rope_table(); `table` may be undefined.
  explicit RopeTable(const Tensor& table) {
    if (!table.defined()) return;
    data = pointer<float>(table);
    rows = table.dim(0);
    half = static_cast<int>(table.dim(1) / 2);
  }
};

// Cosines and sines of pairs [pair, pair + N) at a position. A position outside the table gives
// NaN, because a wrong row would go unnoticed.
template <int N>
struct Angles {
  float cos[N], sin[N];

  __device__ __forceinline__ Angles(const RopeTable& table, int position, int pair) {
#pragma unroll
    for (int n = 0; n < N; ++n) cos[n] = sin[n] = NAN;
    if (position < 0 || position >= table.rows) return;
    const float* row = table.data + int64_t{position} * 2 * table.half + pair;
    load_floats(row, cos);
    load_floats(row + table.half, sin);
  }
};

// y (+)= x rotated by the angles, with sines times `sign`, at offsets 0 and half. y may be x.
template <int N, class T>
__device__ __forceinline__ void rotate(T* y, const T* x, int half, const Angles<N>& angles,
                                       float sign, bool accumulate) {
  // Both halves are loaded before either is written, because y may be x.
  const auto first = load_raw<N>(x), second = load_raw<N>(x + half);
  float out[2][N];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const float a = element(first, n), b = element(second, n), s = sign * angles.sin[n];
    out[0][n] = a * angles.cos[n] - b * s;
    out[1][n] = b * angles.cos[n] + a * s;
  }
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    T* to = y + part * half;
    if (accumulate) {
      const auto old = load_raw<N>(to);
#pragma unroll
      for (int n = 0; n < N; ++n) out[part][n] += element(old, n);
    }
    store_raw(to, to_raw<T>(out[part]));
  }
}

}  // namespace cohort::kernels::cuda
