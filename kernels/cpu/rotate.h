// The rotation of one head, for rope() and rope_kv_write(). Products and sums are rounded one by
// one (no fma), so that all implementations of the formula give the same bits.
#pragma once

#include <algorithm>

#include "kernels/kv_scales.h"
#include "kernels/rope.h"
#include "kernels/vector_math.h"

namespace cohort::kernels::cpu {

// The rotation to a position: cosines and sines of the pairs, for the first and the second half of
// the result. `sign` multiplies the sines.
template <class T>
struct Rotation {
  int64_t half;
  const T *cos[2], *sin[2];
  T sign;

  // From a row of rope_table() for heads of `dim` elements: of width 2 half <= dim, or 2 dim.
  Rotation(const Tensor& table, int64_t row, int64_t dim,
           RopeDirection direction = RopeDirection::kForward)
      : half(std::min(table.dim(1), dim) / 2),
        sign(direction == RopeDirection::kForward ? T(1) : T(-1)) {
    const T* const first = table.data<T>() + row * table.dim(1);
    const T* const second = table.dim(1) == 4 * half ? first + 2 * half : first;
    cos[0] = first, cos[1] = second;
    // The transpose exchanges the sines.
    const bool inverse = direction == RopeDirection::kInverse;
    sin[0] = (inverse ? second : first) + half, sin[1] = (inverse ? first : second) + half;
  }
};

// y (+)= x rotated; both have `dim` elements. y may be x when overwriting.
template <class T>
void rotate(T* y, const T* x, int64_t dim, const Rotation<T>& by, Grad mode = Grad::kOverwrite) {
  const int64_t half = by.half;
  const T *const cos = by.cos[0], *const sin = by.sin[0], sign = by.sign;
  const T *const cos2 = by.cos[1], *const sin2 = by.sin[1];
  if (mode == Grad::kOverwrite) {
    COHORT_VECTORIZE
    for (int64_t i = 0; i < half; ++i) {
      const T a = x[i], b = x[i + half];
      y[i] = a * cos[i] - b * (sign * sin[i]);
      y[i + half] = b * cos2[i] + a * (sign * sin2[i]);
    }
    if (y != x) std::copy(x + 2 * half, x + dim, y + 2 * half);
  } else {
    COHORT_VECTORIZE
    for (int64_t i = 0; i < half; ++i) {
      const T a = x[i], b = x[i + half];
      y[i] += a * cos[i] - b * (sign * sin[i]);
      y[i + half] += b * cos2[i] + a * (sign * sin2[i]);
    }
    for (int64_t i = 2 * half; i < dim; ++i) y[i] += x[i];
  }
}

// Rounds heads of a token, keys and values, to bf16 and to the grids of their scales, in place.
template <class T>
void round_heads(T* heads, const Tensor& scales, int64_t dim) {
  for (int64_t h = 0; h < scales.numel(); ++h, heads += dim)
    std::transform(heads, heads + dim, heads, [grid = E4m3Grid(scales.data<float>()[h])](T x) {
      return static_cast<T>(grid(static_cast<float>(bf16(static_cast<float>(x)))));
    });
}

}  // namespace cohort::kernels::cpu
