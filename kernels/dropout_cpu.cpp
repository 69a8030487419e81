// Dropout: one Philox call serves the four elements that share its address.
#include "kernels/dropout.h"

#include "core/parallel.h"
#include "kernels/cuda_dispatch.h"
#include "kernels/elementwise.h"
#include "kernels/reduce.h"

namespace cohort::kernels {
namespace {

// y (+)= keep ? x factor : 0 for one token; `row` is its Philox stream as in dropout_keep.
template <class T>
void drop_row(T* y, const T* x, int64_t cols, uint64_t seed, uint64_t row, float p, T factor,
              Grad mode) {
  for (int64_t c = 0; c < cols; c += 4) {
    const auto bits = philox(seed, row, static_cast<uint64_t>(c) >> 2);
    const int64_t n = std::min<int64_t>(4, cols - c);
    for (int64_t i = 0; i < n; ++i) {
      const T value = uniform_f32(bits[static_cast<size_t>(i)]) >= p ? x[c + i] * factor : T(0);
      y[c + i] = mode == Grad::kOverwrite ? value : y[c + i] + value;
    }
  }
}

}  // namespace

COHORT_DECLARE_CUDA(dropout)
void dropout(Tensor& y, const Tensor& x, const DropoutSpec& spec, Grad mode) {
  constexpr const char* kOp = "dropout";
  // Draws are compared in f32, where a p just below 1 would be 1.
  COHORT_CHECK(spec.p >= 0 && static_cast<float>(spec.p) < 1,
               "[dropout] expected p in [0, 1), got ", spec.p);
  COHORT_CHECK(x.rank() == 2, "[dropout] expected x [T, C], got ", x.str());
  const int64_t tokens = x.dim(0), cols = x.dim(1);
  const Device device = x.device();
  check_tensor(x, x.shape(), x.dtype(), kOp, "x", device);
  check_tensor(y, x.shape(), x.dtype(), kOp, "y", device);
  if (spec.p == 0) return scale(y, x, 1, mode);
  check_tensor(spec.sequences, {tokens}, DType::kI64, kOp, "sequences", device);
  check_tensor(spec.positions, {tokens}, DType::kI32, kOp, "positions", device);
  COHORT_FORWARD_TO_CUDA(x, dropout(y, x, spec, mode));
  dispatch_float(x.dtype(), kOp, [&]<class T>() {
    const T* in = x.data<T>();
    T* out = y.data<T>();
    const int64_t* sequence = spec.sequences.data<int64_t>();
    const int32_t* position = spec.positions.data<int32_t>();
    const uint64_t stream = dropout_stream(spec.step, spec.layer, spec.site);
    const T factor = static_cast<T>(1 / (1 - spec.p));
    parallel_for(tokens, row_grain(4 * cols), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t)
        drop_row(out + t * cols, in + t * cols, cols, spec.seed,
                 dropout_row(stream, sequence[t], position[t]), static_cast<float>(spec.p), factor,
                 mode);
    });
  });
}

}  // namespace cohort::kernels
