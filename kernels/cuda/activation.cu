// The backward of an MLP's activation on CUDA: of one that is not gated with the gradient of the
// bias before it, and where it is wanted with the activation once more, in one kernel.
#include "kernels/activation.h"
#include "kernels/cuda/column_sum.cuh"
#include "kernels/matmul.h"

namespace cohort::kernels::cuda {
namespace {

// What column_sum() adds for one row: the row of du as it is stored.
template <class T, class Op>
struct ActivationTerm {
  // As in elementwise.cu: the formulas take as long as the memory does, so that many threads are
  // worth more than many rows of each.
  static constexpr int kUnderWay = 2, kBlocks = 4, N = kPackSize<T>;
  const T *dy, *u;
  T *du, *y;  // y may be null

  struct Values {
    Raw<T, N> dy, u;
  };
  template <class Place>
  __device__ __forceinline__ Values load(const Place& at) const {
    return {at.load(dy), at.load(u)};
  }
  template <class Place>
  __device__ __forceinline__ void add(const Place& at, const Values& values,
                                      float (&sum)[1][N]) const {
    float gradient[N], value[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float x = element(values.u, n);
      gradient[n] = element(values.dy, n) * Op::derivative(x, x);
      value[n] = Op::forward(x);
    }
    const auto rounded = to_raw<T>(gradient);
    at.store(du, rounded);
    if (y != nullptr) at.store(y, to_raw<T>(value));
#pragma unroll
    for (int n = 0; n < N; ++n) sum[0][n] += element(rounded, n);
  }
};

template <class Op>
void backward_with_bias(const ActivationBackward& args) {
  dispatch_device(args.u.dtype(), "activation_backward", [&]<class T>() {
    Tensor value = args.y;
    const ActivationTerm<T, Op> term{pointer<T>(args.dy), pointer<T>(args.u), pointer<T>(args.du),
                                     pointer<T>(value)};
    const int64_t cols = args.u.cols();
    const bool vectorized = aligned(term.dy, term.u, term.du, term.y) && cols % kPackSize<T> == 0;
    column_sum<T, ActivationTerm<T, Op>, 1>("activation_backward", term, args.u.rows(), cols,
                                            vectorized, {args.dbias});
  });
}

}  // namespace

void activation_backward(const ActivationBackward& args) {
  const auto& [du, dbias, dy, u, op, y] = args;
  Tensor value = y;
  switch (op) {
#define COHORT_CASE(Op, name)                                                     \
  case Activation::k##Op:                                                         \
    if (dbias.wanted()) return backward_with_bias<Op>(args);                      \
    name##_backward({.dx = {du}, .dy = dy, .x = u, .y = u});                      \
    if (value.defined()) name##_forward({.y = value, .x = u}); /* it may be dy */ \
    return;
    COHORT_UNARY_ACTIVATIONS(COHORT_CASE)
#undef COHORT_CASE
#define COHORT_CASE(Op, name)                                      \
  case Activation::k##Op:                                          \
    name##_backward({.dx = {du}, .dy = dy, .x = u, .y = y});       \
    if (dbias.wanted()) bias_backward({.dbias = dbias, .dy = du}); \
    return;
    COHORT_GATED_OPS(COHORT_CASE)
#undef COHORT_CASE
  }
}

}  // namespace cohort::kernels::cuda
