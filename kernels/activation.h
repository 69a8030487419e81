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

// u = x w^T + bias, y = f(u): the first half of an MLP, with the bits of linear_forward() and
// activation_forward(). On CUDA one kernel does it in bf16 on sm_90 where f is gated: of few rows
// if u is not kept, and of as many as make enough tiles.
struct LinearActivation {
  Tensor& y;           // [T, F]
  const Tensor& x;     // [T, K]
  const Tensor& w;     // [F, K], or [2 F, K] of a gated activation: the gate's rows first
  const Tensor& bias;  // one for each row of w; may be undefined
  Activation op;
  Tensor u = {};  // [T, rows of w]: where defined, kept for the backward
};
void linear_activation(const LinearActivation& args);

// activation_backward() of the product dy w, with the bits of the two. On CUDA, as above, one
// kernel where f is gated.
struct LinearActivationBackward {
  Tensor& du;
  GradOut dbias;
  const Tensor& dy;  // [T, C]
  const Tensor& w;   // [C, F]
  const Tensor& u;
  Activation op;
  Tensor y = {};  // where defined: f(u) once more
};
void linear_activation_backward(const LinearActivationBackward& args);

namespace cpu {
void activation_backward(const ActivationBackward& args);
}  // namespace cpu

namespace cuda {
void activation_backward(const ActivationBackward& args);
// Do it where one kernel takes the op and these sizes; false: nothing was done. The gradient of the
// bias is left to the caller.
bool linear_activation_at_once(const LinearActivation& args);
bool linear_activation_backward_at_once(const LinearActivationBackward& args);
}  // namespace cuda

}  // namespace cohort::kernels
