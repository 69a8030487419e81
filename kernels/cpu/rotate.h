// The rotation of one head, for rope() and rope_kv_write(). Products and sums are rounded one by
// one (no fma), so that all implementations of the formula give the same bits.
#pragma once

#include "kernels/common.h"
#include "kernels/vector_math.h"

namespace cohort::kernels::cpu {

// y (+)= x rotated by the angles with these cosines and sines, sin times `sign`. y may be x when
// overwriting.
template <class T>
void rotate(T* y, const T* x, const T* cos, const T* sin, T sign, int64_t half, Grad mode) {
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
