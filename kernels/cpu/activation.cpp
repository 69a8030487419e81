// The backward of an MLP's activation on the CPU, by the elementwise ops and bias_backward().
#include "kernels/activation.h"

#include "kernels/matmul.h"

namespace cohort::kernels::cpu {

void activation_backward(const ActivationBackward& args) {
  const auto& [du, dbias, dy, u, op, y] = args;
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

}  // namespace cohort::kernels::cpu
