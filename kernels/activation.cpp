#include "kernels/activation.h"

#include "core/dry_run.h"
#include "core/with_cuda.h"
#include "kernels/arguments.h"
#include "kernels/matmul.h"

namespace cohort::kernels {
namespace {

// Elements in a row of the input for each of the output.
int64_t inputs_per_output(Activation op) {
  return is_gated(op) ? 2 : 1;
}

}  // namespace

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
  ArgumentCheck(kOp).bind("G", inputs_per_output(op))(
      "[..., G F] u, du; [..., F] dy, y?; accumulate [G F] dbias?", u, du, dy, y, dbias);
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
  const Device device = x.device();
  ArgumentCheck(kOp).bind("G", inputs_per_output(op))(
      "[..., K] x; [G F, K] w; [G F] bias?; strided [..., F] y; [..., G F] u?", x, w, bias, y, u);
  const OpSpan span(kOp);
  if constexpr (kWithCuda)
    if (device.is_cuda() && !is_dry_run() && cuda::fused_linear_activation(args)) return;
  // Allocated here and not in the device's code, so that a dry run counts it.
  Shape shape = x.shape();
  shape[-1] = w.dim(0);
  Tensor linear = u.defined() ? u : Tensor::empty(shape, x.dtype(), device);
  linear_forward({.y = linear, .x = x, .w = w, .bias = bias, .tail = tail});
  Tensor value = y.is_contiguous() ? y : Tensor::empty(y.shape(), y.dtype(), device);
  activation_forward({.y = value, .u = linear, .op = op});
  if (!y.is_contiguous()) y.copy_(value);
}

void linear_activation_backward(const LinearActivationBackward& args) {
  constexpr const char* kOp = "linear_activation_backward";
  const auto& [du, dbias, dy, w, u, op, y, dh, a] = args;
  const Device device = dy.device();
  ArgumentCheck check(kOp);
  check.bind("G", inputs_per_output(op));
  check("[..., C] dy; strided [C, F] w; [..., G F] u, du; [..., F] y?; accumulate [G F] dbias?", dy,
        w, u, du, y, dbias);
  if (dh.defined()) check("[rows, P] dh; [P, F] a", dh, a);
  const OpSpan span(kOp);
  if constexpr (kWithCuda)
    if (device.is_cuda() && !is_dry_run() && cuda::fused_linear_activation_backward(args)) {
      if (dbias.wanted()) bias_backward({.dbias = dbias, .dy = du});
      return;
    }
  Shape shape = dy.shape();
  shape[-1] = w.dim(1);
  Tensor df = y.defined() ? y : Tensor::empty(shape, dy.dtype(), device);
  matmul({.c = df, .a = dy, .b = w});
  if (dh.defined()) matmul({.c = df, .a = dh, .b = a, .desc = {.out = Grad::kAccumulate}});
  activation_backward({.du = du, .dbias = dbias, .dy = df, .u = u, .op = op, .y = y});
}

}  // namespace cohort::kernels
