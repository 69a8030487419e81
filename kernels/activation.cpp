#include "kernels/activation.h"

#include "core/with_cuda.h"

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
  on_device<cpu::activation_backward, cuda::activation_backward>(device, args);
}

}  // namespace cohort::kernels
