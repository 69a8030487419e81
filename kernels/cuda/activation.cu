// The activation of an MLP on CUDA: its backward, of one that is not gated with the gradient of the
// bias before it, and where it is wanted with the activation once more, in one kernel; and whether
// a gated one goes into the kernel of the product beside it (hopper/product_activation.cuh).
#include "kernels/activation.h"

#include <algorithm>

#include "kernels/cuda/column_sum.cuh"
#include "kernels/cuda/hopper/product.h"
#include "kernels/cuda/product_order.h"
#include "kernels/cuda/skinny.h"
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

namespace {

// Whether these start at multiples of 16 bytes, and so do their rows.
template <class... Tensors>
bool in_rows_of_16_bytes(const Tensors&... tensors) {
  const auto fits = [](const Tensor& t) {
    return !t.defined() || (t.dtype() == DType::kBF16 && t.cols() % kPackSize<__nv_bfloat16> == 0 &&
                            aligned(static_cast<const char*>(t.raw())));
  };
  return (fits(tensors) && ...);
}

// Whether hopper/product.cuh is for a product of rows x k times k x cols: its tiles of 128 x 192
// are to keep 60 % of the multiprocessors busy, the last turn among them.
bool makes_enough_tiles(int64_t rows, int64_t cols, int64_t k, Device device) {
  if (std::min({rows, cols, k}) == 0 || std::max({rows, cols, k}) >= 1 << 30 ||
      !::cohort::cuda::is_hopper(device))
    return false;
  const int64_t tiles = (rows + 127) / 128 * ((cols + 191) / 192);
  const int64_t blocks = ::cohort::cuda::multiprocessors(device);
  return 10 * tiles >= 6 * ((tiles + blocks - 1) / blocks * blocks);
}

// Calls fn.operator()<Op>() for a gated op; false: it is none.
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

bool linear_activation_at_once(const LinearActivation& args) {
  const auto& [y, x, w, bias, op, u] = args;
  const Device device = x.device();
  if (!is_gated(op) || !in_rows_of_16_bytes(x, w, bias)) return false;
  // Measured with 896 channels. With more than this the pass that is saved is less than a fifteenth
  // of the product.
  constexpr int64_t kMostChannels = 4096;
  const bool few = !u.defined() && aligned(static_cast<const char*>(y.raw())) &&
                   is_gated_skinny({x.rows(), w.rows(), x.cols()}, device);
  const bool many = in_rows_of_16_bytes(y, u) && x.cols() <= kMostChannels &&
                    makes_enough_tiles(x.rows(), w.rows(), x.cols(), device);
  if ((!few && !many) || !linear_adds_in_order(x, w, bias)) return false;
  if (!few) return for_gated_op(op, [&]<class Op>() { product_activation<Op>(args); });
  gated_skinny_product({.y = y, .x = x, .w = w, .bias = bias}, op);
  return true;
}

bool linear_activation_backward_at_once(const LinearActivationBackward& args) {
  const auto& [du, dbias, dy, w, u, op, y] = args;
  return in_rows_of_16_bytes(dy, w, u, du, y) &&
         makes_enough_tiles(dy.rows(), w.cols(), dy.cols(), dy.device()) &&
         for_gated_op(op, [&]<class Op>() { product_activation_backward<Op>(args); });
}

}  // namespace cohort::kernels::cuda
