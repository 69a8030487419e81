// Reductions in a fixed order. A row is summed in kLanes interleaved partial sums that are added as
// a tree, which vectorises well; a column is summed over fixed blocks of rows. Neither depends on
// the thread count.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/parallel.h"
#include "core/sizes.h"
#include "kernels/common.h"
#include "kernels/vector_math.h"

namespace cohort::kernels {

inline constexpr int64_t kLanes = 16;
// Elements per block of a parallel loop: large enough to outweigh the cost of a hand-over to a
// thread.
inline constexpr int64_t kElementGrain = 16384;

// Rows of `cols` elements per block of a parallel loop over rows.
inline int64_t row_grain(int64_t cols) {
  return std::max<int64_t>(1, kElementGrain / std::max<int64_t>(1, cols));
}

// fn(r) for every row, in parallel.
template <class F>
void for_rows(int64_t rows, int64_t cols, F&& fn) {
  parallel_for(rows, row_grain(cols), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) fn(r);
  });
}

// out[i] (+)= value(i) for i in [begin, end).
template <class T, class F>
void write_range(T* out, int64_t begin, int64_t end, Grad mode, F&& value) {
  if (mode == Grad::kOverwrite) {
    COHORT_VECTORIZE
    for (int64_t i = begin; i < end; ++i) out[i] = value(i);
  } else {
    COHORT_VECTORIZE
    for (int64_t i = begin; i < end; ++i) out[i] += value(i);
  }
}

// Sum of term(i) for i in [0, n).
template <class T, class F>
inline T lane_sum(int64_t n, F&& term) {
  T lane[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t l = 0; l < kLanes; ++l) lane[l] += term(i + l);
  for (int64_t l = 0; i + l < n; ++l) lane[l] += term(i + l);
  for (int64_t width = kLanes / 2; width > 0; width /= 2)
    for (int64_t l = 0; l < width; ++l) lane[l] += lane[l + width];
  return lane[0];
}

// The largest of x[0, n), -inf for n = 0. NaNs are ignored.
template <class T>
inline T lane_max(const T* x, int64_t n) {
  T lane[kLanes];
  std::fill(lane, lane + kLanes, -std::numeric_limits<T>::infinity());
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t l = 0; l < kLanes; ++l) lane[l] = x[i + l] > lane[l] ? x[i + l] : lane[l];
  for (int64_t l = 0; i + l < n; ++l) lane[l] = x[i + l] > lane[l] ? x[i + l] : lane[l];
  return *std::max_element(lane, lane + kLanes);
}

// out[c] (+)= sum over rows of a [rows, cols] quantity. add(begin, end, partial) adds rows
// [begin, end) to `partial`, which starts at zero; it runs once per block of 64 rows.
template <class T, class F>
void column_sum(T* out, int64_t rows, int64_t cols, Grad mode, F&& add) {
  constexpr int64_t kBlock = 64;
  const int64_t blocks = ceil_div(rows, kBlock);
  std::vector<T> partial(static_cast<size_t>(blocks * cols));
  parallel_for(rows, kBlock, [&](int64_t begin, int64_t end) {
    add(begin, end, partial.data() + begin / kBlock * cols);
  });
  parallel_for(cols, 1024, [&](int64_t begin, int64_t end) {
    if (mode == Grad::kOverwrite) std::fill(out + begin, out + end, T(0));
    for (int64_t b = 0; b < blocks; ++b) {
      const T* row = partial.data() + b * cols;
      for (int64_t c = begin; c < end; ++c) out[c] += row[c];
    }
  });
}

}  // namespace cohort::kernels
