// The matrix product on CUDA behind matmul() and linear_forward(), whose checks have been made.
#pragma once

#include "kernels/matmul.h"

namespace cohort::kernels::cuda {

// c (+)= op(a) op(b) + bias, all f32, or a, b and bias bf16 with c bf16 or f32; `bias` may be
// undefined.
void product(Tensor& c, const Tensor& a, const Tensor& b, const Tensor& bias,
             const MatmulDesc& desc);

}  // namespace cohort::kernels::cuda
