// The rotation of N neighbouring pairs of a head: N elements of its first half with those of its
// second half. rope() and what writes keys to the cache have it in common, and so their bits.
#pragma once

#include "kernels/cuda/raw.cuh"

namespace cohort::kernels::cuda {

// A rotary table [rows, cos of half pairs | sin of half pairs].
struct RopeTable {
  const float* data = nullptr;  // null: no rotation
  int64_t rows = 0;
  int half = 0;
};

// The cosines and sines of pairs [pair, pair + N) at a position. A position outside the table has
// no angles: what they rotate becomes NaN, where a wrong row would look right.
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

// y (+)= x at offsets 0 and half, rotated by the angles, sines times `sign`. y may be x.
template <int N, class T>
__device__ __forceinline__ void rotate(T* y, const T* x, int half, const Angles<N>& angles,
                                       float sign, bool accumulate) {
  // Both halves are loaded before either is written: y may be x.
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
