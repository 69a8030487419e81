// What core/tensor.cpp needs of CUDA: moving and converting elements. Defined in CUDA builds only.
#pragma once

#include "core/tensor.h"

namespace cohort::cuda {

// Both contiguous, of one dtype; at least one on a CUDA device. To the host: returns when done.
void copy_bytes(Tensor& to, const Tensor& from);
// Both on one CUDA device; any strides and dtypes, equal shapes.
void copy_elements(Tensor& to, const Tensor& from);
void fill(Tensor& t, double value);
void zero_bytes(Tensor& t);  // contiguous

}  // namespace cohort::cuda
