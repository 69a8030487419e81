// Dropout: one Philox call serves the four elements that share its address.
#include "kernels/dropout.h"

#include "kernels/cpu/reduce.h"
#include "kernels/elementwise.h"

namespace cohort::kernels::cpu {
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

void dropout(const Dropout& args) {
  dispatch_float(args.x.dtype(), "dropout", [&]<class T>() {
    const int64_t cols = args.x.dim(1);
    const T* in = args.x.data<T>();
    T* out = args.y.data<T>();
    const DropoutSpec& spec = args.spec;
    const int64_t* sequence = spec.sequences.data<int64_t>();
    const int32_t* position = spec.positions.data<int32_t>();
    const T factor = static_cast<T>(1 / (1 - spec.p));
    for_rows(args.x.dim(0), 4 * cols, [&](int64_t t) {
      drop_row(out + t * cols, in + t * cols, cols, spec.seed,
               dropout_row(spec.stream, sequence[t], position[t]), static_cast<float>(spec.p),
               factor, args.mode);
    });
  });
}

}  // namespace cohort::kernels::cpu
