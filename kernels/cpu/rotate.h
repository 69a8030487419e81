// The rotation of one head, for rope() and rope_kv_write(). Products and sums are rounded one by
// one (no fma), so that all implementations of the formula give the same bits.
#pragma once

#include "kernels/common.h"
#include "kernels/vector_math.h"

namespace cohort::kernels::cpu {

// A row of the rotary table: `half` cosines, then the sines, which `sign` multiplies.
template <class T>
struct Rotation {
  const T* row;
  int64_t half;
  T sign = 1;
};

// y (+)= x rotated; both have 2 half elements. y may be x when overwriting.
template <class T>
void rotate(T* y, const T* x, const Rotation<T>& by, Grad mode = Grad::kOverwrite) {
  const int64_t half = by.half;
  const T *const cos = by.row, *const sin = cos + half, sign = by.sign;
  if (mode == Grad::kOverwrite) {
    COHORT_VECTORIZE
    for (int64_t i = 0; i < half; ++i) {
      const T a = x[i], b = x[i + half], s = sign * sin[i];
      y[i] = a * cos[i] - b * s;
      y[i + half] = b * cos[i] + a * s;
    }
  } else {
    COHORT_VECTORIZE
    for (int64_t i = 0; i < half; ++i) {
      const T a = x[i], b = x[i + half], s = sign * sin[i];
      y[i] += a * cos[i] - b * s;
      y[i + half] += b * cos[i] + a * s;
    }
  }
}

}  // namespace cohort::kernels::cpu
