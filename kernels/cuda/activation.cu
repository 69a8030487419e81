// MLP activations on CUDA: the backward, fused for unary activations with the gradient of the
// preceding bias and the optional recomputation of the output; and the decision whether a gated
// activation is fused into the adjacent GEMM (sm90/gemm_activation.cuh).
#include "kernels/activation.h"

#include <algorithm>

#include "kernels/cuda/accumulation_order.h"
#include "kernels/cuda/column_sum.cuh"
#include "kernels/cuda/sm90/gemm_activation.h"
#include "kernels/cuda/sm90/skinny_gemm.h"
#include "kernels/matmul.h"

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

namespace {

// True if all defined tensors are bf16 and their rows are aligned to 16 bytes.
template <class... Tensors>
bool has_aligned_bf16_rows(const Tensors&... tensors) {
  const auto fits = [](const Tensor& t) {
    return !t.defined() || (t.dtype() == DType::kBF16 && t.cols() % kPackSize<bf16> == 0 &&
                            aligned(static_cast<const char*>(t.raw())));
  };
  return (fits(tensors) && ...);
}

// True if sm90/gemm.cuh suits a GEMM of [rows, k] and [k, cols]: its 128 x 192 tiles must occupy
// at least 60 % of the multiprocessors, averaged over all waves.
bool has_enough_tiles(int64_t rows, int64_t cols, int64_t k, Device device) {
  if (std::min({rows, cols, k}) == 0 || std::max({rows, cols, k}) >= 1 << 30 ||
      !::cohort::cuda::is_hopper(device))
    return false;
  const int64_t tiles = (rows + 127) / 128 * ((cols + 191) / 192);
  const int64_t blocks = ::cohort::cuda::multiprocessors(device);
  return 10 * tiles >= 6 * ((tiles + blocks - 1) / blocks * blocks);
}

// Calls fn.operator()<Op>() for a gated op; returns false for others.
template <class F>
bool for_gated_op(Activation op, F&& fn) {
  switch (op) {
#define COHORT_CASE(Op, name)     \
  case Activation::k##Op:         \
    fn.template operator()<Op>(); \
    return true;
    COHORT_GATED_OPS(COHORT_CASE)
#undef COHORT_CASE
    default:
      return false;
  }
}

}  // namespace

bool fused_linear_activation(const LinearActivation& args) {
  const auto& [y, x, w, bias, op, u] = args;
  const Device device = x.device();
  if (!is_gated(op) || !has_aligned_bf16_rows(x, w, bias)) return false;
  // Measured with 896 channels. Above this limit the saved pass costs less than 1/15 of the GEMM.
  constexpr int64_t kMaxChannels = 4096;
  const bool use_skinny = !u.defined() && aligned(static_cast<const char*>(y.raw())) &&
                          is_gated_skinny({x.rows(), w.rows(), x.cols()}, device);
  const bool use_gemm = has_aligned_bf16_rows(y, u) && x.cols() <= kMaxChannels &&
                        has_enough_tiles(x.rows(), w.rows(), x.cols(), device);
  if ((!use_skinny && !use_gemm) || !linear_accumulates_in_order(x, w, bias)) return false;
  if (!use_skinny) return for_gated_op(op, [&]<class Op>() { gemm_activation<Op>(args); });
  gated_skinny_gemm({.y = y, .x = x, .w = w, .bias = bias}, op);
  return true;
}

bool fused_linear_activation_backward(const LinearActivationBackward& args) {
  const auto& [du, dbias, dy, w, u, op, y] = args;
  return has_aligned_bf16_rows(dy, w, u, du, y) &&
         has_enough_tiles(dy.rows(), w.cols(), dy.cols(), dy.device()) &&
         for_gated_op(op, [&]<class Op>() { gemm_activation_backward<Op>(args); });
}

}  // namespace cohort::kernels::cuda
