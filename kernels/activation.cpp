#include "kernels/activation.h"

#include "core/dry_run.h"
#include "core/with_cuda.h"
#include "kernels/matmul.h"

namespace cohort::kernels {

void activation_forward(const ActivationForward& args) {
  switch (args.op) {
#define COHORT_CASE(Op, name) \
  case Activation::k##Op:     \
    return name##_forward({.y = args.y, .x = args.u});
    COHORT_UNARY_ACTIVATIONS(COHORT_CASE)
    COHORT_GATED_OPS(COHORT_CASE)
#undef COHORT_CASE
  }
}

void activation_backward(const ActivationBackward& args) {
  constexpr const char* kOp = "activation_backward";
  const auto& [du, dbias, dy, u, op, y] = args;
  const Device device = u.device();
  const int64_t halves = is_gated(op) ? 2 : 1;
  COHORT_CHECK(u.rank() >= 1 && u.dim(-1) % halves == 0, "[", kOp,
               "] expected u with rows of two halves, got ", u.str());
  Shape shape = u.shape();
  shape[-1] /= halves;
  check_tensor(u, u.shape(), u.dtype(), kOp, "u", device);
  check_tensor(dy, shape, u.dtype(), kOp, "dy", device);
  check_tensor(du, u.shape(), u.dtype(), kOp, "du", device);
  check_grad(dbias, {u.cols()}, accumulate_dtype(u.dtype()), kOp, "dbias", device);
  if (y.defined()) check_tensor(y, shape, u.dtype(), kOp, "y", device);
  const OpSpan span(kOp);
  if constexpr (kWithCuda)
    if (device.is_cuda() && !is_dry_run() && cuda::fused_activation_backward(args)) return;
  Tensor value = y;
  switch (op) {
#define COHORT_CASE(Op, name)                                                          \
  case Activation::k##Op:                                                              \
    name##_backward({.dx = {du}, .dy = dy, .x = u, .y = u});                           \
    if (value.defined()) name##_forward({.y = value, .x = u}); /* last: y may be dy */ \
    break;
    COHORT_UNARY_ACTIVATIONS(COHORT_CASE)
#undef COHORT_CASE
#define COHORT_CASE(Op, name)                                \
  case Activation::k##Op:                                    \
    name##_backward({.dx = {du}, .dy = dy, .x = u, .y = y}); \
    break;
    COHORT_GATED_OPS(COHORT_CASE)
#undef COHORT_CASE
  }
  if (dbias.wanted()) bias_backward({.dbias = dbias, .dy = du});
}

void linear_activation(const LinearActivation& args) {
  constexpr const char* kOp = "linear_activation";
  const auto& [y, x, w, bias, op, u, tail] = args;
  const int64_t halves = is_gated(op) ? 2 : 1;
  COHORT_CHECK(w.rank() == 2 && w.dim(0) % halves == 0, "[", kOp,
               "] expected w with rows of two halves, got ", w.str());
  COHORT_CHECK(x.cols() == w.dim(1), "[", kOp, "] expected x with rows of ", w.dim(1), ", got ",
               x.str());
  Shape shape = x.shape();
  const Device device = x.device();
  check_tensor(x, shape, x.dtype(), kOp, "x", device);
  check_tensor(w, w.shape(), x.dtype(), kOp, "w", device);
  if (bias.defined()) check_tensor(bias, {w.dim(0)}, x.dtype(), kOp, "bias", device);
  shape[-1] = w.dim(0) / halves;
  check_rows(y, shape, x.dtype(), kOp, "y", device);
  shape[-1] = w.dim(0);
  if (u.defined()) check_tensor(u, shape, x.dtype(), kOp, "u", device);
  const OpSpan span(kOp);
  if constexpr (kWithCuda)
    if (device.is_cuda() && !is_dry_run() && cuda::fused_linear_activation(args)) return;
  // Allocated here and not in the device's code, so that a dry run counts it.
  Tensor linear = u.defined() ? u : Tensor::empty(shape, x.dtype(), device);
  linear_forward({.y = linear, .x = x, .w = w, .bias = bias, .tail = tail});
  Tensor value = y.is_contiguous() ? y : Tensor::empty(y.shape(), y.dtype(), device);
  activation_forward({.y = value, .u = linear, .op = op});
  if (!y.is_contiguous()) y.copy_(value);
}

void linear_activation_backward(const LinearActivationBackward& args) {
  constexpr const char* kOp = "linear_activation_backward";
  const auto& [du, dbias, dy, w, u, op, y, dh, a] = args;
  const int64_t halves = is_gated(op) ? 2 : 1;
  COHORT_CHECK(w.rank() == 2 && dy.cols() == w.dim(0), "[", kOp, "] expected w with ", dy.cols(),
               " rows, got ", w.str());
  Shape shape = dy.shape();
  const Device device = dy.device();
  check_tensor(dy, shape, dy.dtype(), kOp, "dy", device);
  check_rows(w, w.shape(), dy.dtype(), kOp, "w", device);
  if (dh.defined()) {
    check_tensor(dh, {dy.rows(), dh.cols()}, dy.dtype(), kOp, "dh", device);
    check_tensor(a, {dh.cols(), w.dim(1)}, dy.dtype(), kOp, "a", device);
  }
  shape[-1] = w.dim(1) * halves;
  check_tensor(u, shape, dy.dtype(), kOp, "u", device);
  check_tensor(du, shape, dy.dtype(), kOp, "du", device);
  check_grad(dbias, {u.cols()}, accumulate_dtype(dy.dtype()), kOp, "dbias", device);
  shape[-1] = w.dim(1);
  if (y.defined()) check_tensor(y, shape, dy.dtype(), kOp, "y", device);
  const OpSpan span(kOp);
  if constexpr (kWithCuda)
    if (device.is_cuda() && !is_dry_run() && cuda::fused_linear_activation_backward(args)) {
      if (dbias.wanted()) bias_backward({.dbias = dbias, .dy = du});
      return;
    }
  Tensor df = y.defined() ? y : Tensor::empty(shape, dy.dtype(), device);
  matmul({.c = df, .a = dy, .b = w});
  if (dh.defined()) matmul({.c = df, .a = dh, .b = a, .desc = {.out = Grad::kAccumulate}});
  activation_backward({.du = du, .dbias = dbias, .dy = df, .u = u, .op = op, .y = y});
}

}  // namespace cohort::kernels
