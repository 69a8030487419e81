// The backward of an MLP's activation on CUDA in one kernel, if it is not gated: du, the gradient
// of the preceding bias, and the optional recomputation of the output. Gated activations are fused
// with their GEMMs instead (sm90/gemm_activation.cu).
#include "kernels/activation.h"

#include "kernels/cuda/column_sum.cuh"

namespace cohort::kernels::cuda {
namespace {

// Term of column_sum(): the row of du as rounded for storage.
template <class T, class Op>
struct ActivationTerm {
  // As in elementwise.cu: the formulas take as long as the memory accesses, so occupancy matters
  // more than rows in flight per thread.
  static constexpr int kBatchRows = 2, kBlocks = 4, N = kPackSize<T>;
  const T *dy, *u;
  T *du, *y;  // y may be null

  struct Values {
    Raw<T, N> dy, u;
  };
  template <class Location>
  __device__ __forceinline__ Values load(const Location& at) const {
    return {at.load(dy), at.load(u)};
  }
  template <class Location>
  __device__ __forceinline__ void add(const Location& at, const Values& values,
                                      float (&sum)[N]) const {
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
    for (int n = 0; n < N; ++n) sum[n] += element(rounded, n);
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
    column_sum<T>("activation_backward", term, args.u.rows(), cols, vectorized, args.dbias);
  });
}

}  // namespace

bool fused_activation_backward(const ActivationBackward& args) {
  if (!args.dbias.wanted()) return false;
  switch (args.op) {
#define COHORT_CASE(Op, name)     \
  case Activation::k##Op:         \
    backward_with_bias<Op>(args); \
    return true;
    COHORT_UNARY_ACTIVATIONS(COHORT_CASE)
#undef COHORT_CASE
    default:
      return false;
  }
}

}  // namespace cohort::kernels::cuda
