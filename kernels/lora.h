// Low-rank adapters of linear layers (LoRA, Hu et al. 2021): y = x w^T + s (x A^T) B^T + bias, with
// a frozen w. Both products are one sum: y = round([x | h] [w | s B]^T + bias), h = round(x A^T),
// by linear_forward() with the columns of h as its tail. See docs/lora.md.
#pragma once

#include "kernels/common.h"

namespace cohort::kernels {

// h = x A^T, the tail of x. A row of h has the same bits among any number of rows.
struct LoraInput {
  Tensor& h;         // [T, P]; may be columns of a wider matrix, such as those after x
  const Tensor& x;   // [T, K]; may be columns of a wider matrix
  const Tensor& a;   // [P, K]
  Tensor copy = {};  // output, may be undefined: h again, contiguous [T, P]
};
COHORT_KERNEL(void lora_input(const LoraInput& args));

namespace cuda {
// True if lora_input() supports the arguments: bf16 with rows aligned to 16 bytes, P a multiple of
// 64. kernels::lora_input() composes others of a GEMM and copies.
bool has_lora_kernel(const LoraInput& args);
}  // namespace cuda

}  // namespace cohort::kernels
