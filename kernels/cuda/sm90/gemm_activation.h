// GEMMs for sm_90 with a fused gated activation. Rows and addresses of all matrices are multiples
// of 16 bytes.
#pragma once

#include "kernels/activation.h"

namespace cohort::kernels::cuda {

// linear_activation() of a gated op and its backward without the gradient of the bias, in bf16. One
// file per op instantiates both.
template <class Op>
void gemm_activation(const LinearActivation& args);
template <class Op>
void gemm_activation_backward(const LinearActivationBackward& args);

}  // namespace cohort::kernels::cuda
