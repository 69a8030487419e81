// The activations of MLPs. The backward can also give the gradient of the bias in u = x w^T + bias,
// which is the sum of du over rows.
#pragma once

#include "kernels/elementwise.h"

namespace cohort::kernels {

enum class Activation { kSwiGlu, kGelu, kGeluTanh, kGeGlu, kGeGluTanh };
// The activations that are not gated.
#define COHORT_UNARY_ACTIVATIONS(X) X(Gelu, gelu) X(GeluTanh, gelu_tanh)
// True if the activation takes the two halves of a row, gate and up.
inline bool is_gated(Activation op) {
  return op != Activation::kGelu && op != Activation::kGeluTanh;
}

// y = f(u) by the elementwise ops.
struct ActivationForward {
  Tensor& y;        // [..., F]
  const Tensor& u;  // [..., F]; if gated, [..., 2 F]: gate | up
  Activation op;
};
void activation_forward(const ActivationForward& args);

// du = dy f'(u), dbias (+)= column sums of du, with the bits of the elementwise op's backward and
// of bias_backward().
struct ActivationBackward {
  Tensor& du;
  GradOut dbias;  // [cols of u], a weight gradient
  const Tensor &dy, &u;
  Activation op;
  Tensor y = {};  // output, may be undefined or dy: f(u), recomputed
};
void activation_backward(const ActivationBackward& args);

// u = x w^T + bias, y = f(u): the first half of an MLP, with the bits of linear_forward() and
// activation_forward().
struct LinearActivation {
  Tensor& y;           // [T, F]; may be columns of a wider matrix
  const Tensor& x;     // [T, K]
  const Tensor& w;     // [F, K]; if gated, [2 F, K]: the gate's rows first
  const Tensor& bias;  // [rows of w]; may be undefined
  Activation op;
  Tensor u = {};     // output for the backward [T, rows of w], may be undefined
  int64_t tail = 0;  // as in LinearForward
};
void linear_activation(const LinearActivation& args);

// activation_backward() applied to dy w, with the bits of matmul() and activation_backward(); with
// an adapter behind the activation to dy w + dh a. w may be columns of a wider matrix.
struct LinearActivationBackward {
  Tensor& du;
  GradOut dbias;
  const Tensor& dy;  // [T, C]
  const Tensor& w;   // [C, F]
  const Tensor& u;
  Activation op;
  Tensor y = {};           // output, may be undefined: f(u), recomputed
  Tensor dh = {}, a = {};  // [T, P] and [P, F], or undefined
};
void linear_activation_backward(const LinearActivationBackward& args);

namespace cuda {
// The ops in one kernel each; false, without any effect, if none supports the arguments.
// activation_backward() of an activation that is not gated, with dbias.
bool fused_activation_backward(const ActivationBackward& args);
// Gated activations in bf16 on sm_90: a skinny GEMM for few rows if u is not kept, and a GEMM for
// enough rows to fill the device with tiles. The caller computes dbias.
bool fused_linear_activation(const LinearActivation& args);
bool fused_linear_activation_backward(const LinearActivationBackward& args);
}  // namespace cuda

}  // namespace cohort::kernels
