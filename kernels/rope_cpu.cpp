// Rotary embedding from a table. The rotation uses separate products and sums (no fma), each
// rounded once, so that every implementation of the formula gives the same bits.
#include <cmath>

#include "core/parallel.h"
#include "kernels/cuda_dispatch.h"
#include "kernels/reduce.h"
#include "kernels/rope.h"
#include "kernels/vector_math.h"

namespace cohort::kernels {
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

Tensor rope_table(int64_t positions, int64_t head_dim, double theta, DType dtype) {
  COHORT_CHECK(positions >= 0 && head_dim > 0 && head_dim % 2 == 0 && theta > 0,
               "[rope_table] expected positions >= 0, an even head_dim and theta > 0, got ",
               positions, ", ", head_dim, " and ", theta);
  Tensor table = Tensor::empty({positions, head_dim}, dtype);
  dispatch_float(dtype, "rope_table", [&]<class T>() {
    const int64_t half = head_dim / 2;
    T* out = table.data<T>();
    for (int64_t i = 0; i < half; ++i) {
      const double frequency =
          std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim));
      for (int64_t p = 0; p < positions; ++p) {
        const double angle = static_cast<double>(p) * frequency;
        out[p * head_dim + i] = static_cast<T>(std::cos(angle));
        out[p * head_dim + half + i] = static_cast<T>(std::sin(angle));
      }
    }
  });
  return table;
}

COHORT_DECLARE_CUDA(rope)
void rope(Tensor& y, const Tensor& x, const Tensor& positions, const Tensor& table,
          RopeDirection direction, Grad mode) {
  constexpr const char* kOp = "rope";
  COHORT_CHECK(x.rank() == 3 && table.rank() == 2, "[rope] expected x [T, H, D] and a table, got ",
               x.str(), " and ", table.str());
  const int64_t tokens = x.dim(0), heads = x.dim(1), dim = x.dim(2), rows = table.dim(0);
  COHORT_CHECK(dim % 2 == 0, "[rope] expected an even head size, got ", x.str());
  const Device device = x.device();
  check_tensor(x, x.shape(), x.dtype(), kOp, "x", device);
  check_tensor(y, x.shape(), x.dtype(), kOp, "y", device);
  check_tensor(table, {rows, dim}, accumulate_dtype(x.dtype()), kOp, "table", device);
  check_tensor(positions, {tokens}, DType::kI32, kOp, "positions", device);
  COHORT_FORWARD_TO_CUDA(x, rope(y, x, positions, table, direction, mode));
  dispatch_float(x.dtype(), kOp, [&]<class T>() {
    const int32_t* position = positions.data<int32_t>();
    for (int64_t t = 0; t < tokens; ++t)
      COHORT_CHECK(position[t] >= 0 && position[t] < rows, "[rope] position ", position[t],
                   " of token ", t, " is outside the table of ", rows, " positions");
    const T *in = x.data<T>(), *angles = table.data<T>();
    T* out = y.data<T>();
    const T sign = direction == RopeDirection::kForward ? T(1) : T(-1);
    parallel_for(tokens, row_grain(heads * dim), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const T* cos = angles + position[t] * dim;
        for (int64_t h = 0; h < heads; ++h) {
          const int64_t at = (t * heads + h) * dim;
          rotate(out + at, in + at, cos, cos + dim / 2, sign, dim / 2, mode);
        }
      }
    });
  });
}

}  // namespace cohort::kernels
