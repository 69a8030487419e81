// The activations of MLPs. The backward takes the bias before the activation along: where u = x w^T
// + bias, the gradient of the bias is the sum over the rows of du.
#pragma once

#include "kernels/elementwise.h"

namespace cohort::kernels {

enum class Activation { kSwiGlu, kGelu, kGeluTanh, kGeGlu, kGeGluTanh };
// Those that are not gated.
#define COHORT_UNARY_ACTIVATIONS(X) X(Gelu, gelu) X(GeluTanh, gelu_tanh)
// Whether it is of the two halves of a row, gate and up.
inline bool is_gated(Activation op) {
  return op != Activation::kGelu && op != Activation::kGeluTanh;
}

// y = f(u), by the elementwise ops.
struct ActivationForward {
  Tensor& y;        // [..., F]
  const Tensor& u;  // [..., F], or [..., 2 F] of a gated one: gate | up
  Activation op;
};
void activation_forward(const ActivationForward& args);

// du = dy f'(u), dbias (+)= column sums of du, with the bits of the elementwise op's backward and
// of bias_backward(). On CUDA one kernel does it all where the bias's gradient is wanted and the
// activation is not gated.
struct ActivationBackward {
  Tensor& du;
  GradOut dbias;  // [cols of u], a weight gradient
  const Tensor &dy, &u;
  Activation op;
  // Where defined: f(u) once more, for those that did not keep it; may be dy.
  Tensor y = {};
};
void activation_backward(const ActivationBackward& args);

namespace cpu {
void activation_backward(const ActivationBackward& args);
}  // namespace cpu

namespace cuda {
void activation_backward(const ActivationBackward& args);
}  // namespace cuda

}  // namespace cohort::kernels
