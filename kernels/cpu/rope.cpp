// Rotary embedding from a table on the CPU. The rotation uses separate products and sums (no fma),
// each rounded once, so that every implementation of the formula gives the same bits.
#include "kernels/rope.h"
#include "core/parallel.h"
#include "kernels/cpu/reduce.h"
#include "kernels/vector_math.h"

namespace cohort::kernels::cpu {
namespace {

// One head: y (+)= x rotated by the angles with these cosines and sines, sin times `sign`.
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

}  // namespace

void rope(const Rope& args) {
  const int64_t tokens = args.x.dim(0), heads = args.x.dim(1), dim = args.x.dim(2);
  const int64_t rows = args.table.dim(0);
  dispatch_float(args.x.dtype(), "rope", [&]<class T>() {
    const int32_t* position = args.positions.data<int32_t>();
    for (int64_t t = 0; t < tokens; ++t)
      COHORT_CHECK(position[t] >= 0 && position[t] < rows, "[rope] position ", position[t],
                   " of token ", t, " is outside the table of ", rows, " positions");
    const T *in = args.x.data<T>(), *angles = args.table.data<T>();
    T* out = args.y.data<T>();
    const T sign = args.direction == RopeDirection::kForward ? T(1) : T(-1);
    parallel_for(tokens, row_grain(heads * dim), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const T* cos = angles + position[t] * dim;
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t at = (t * heads + h) * dim;
          rotate(out + at, in + at, cos, cos + dim / 2, sign, dim / 2, args.mode);
        }
      }
    });
  });
}

}  // namespace cohort::kernels::cpu
