// Products for sm_90 alone that make more of their sums than rounding and storing them. Rows of all
// matrices are multiples of 16 bytes, as their addresses are.
#pragma once

#include "kernels/activation.h"

namespace cohort::kernels::cuda {

// linear_activation() of a gated op, and its backward without the gradient of the bias, in bf16; a
// file for each op compiles both.
template <class Op>
void product_activation(const LinearActivation& args);
template <class Op>
void product_activation_backward(const LinearActivationBackward& args);

}  // namespace cohort::kernels::cuda
