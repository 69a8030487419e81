// Conventions of every kernel in this folder.
//
//  * kernels/<op>.h is the contract: one struct of arguments per call, outputs before inputs, and
//    three functions that take it. kernels::op() checks the arguments (kernels/<op>.cpp) and calls
//    cpu::op() (kernels/cpu/) or cuda::op() (kernels/cuda/), which get what has been checked.
//  * A kernel is a pure function on tensors: it writes its outputs, allocates no tensor that
//    outlives it, and takes shapes from the tensors. Inputs and outputs are contiguous unless a
//    contract says otherwise.
//  * A mismatch of shape or dtype throws Error("[op] ...") before anything is written.
//  * CPU tensors are f64 or f32, CUDA tensors f32 or bf16; all tensors of a call share one dtype
//    and device unless a contract says otherwise. With bf16 tensors, arithmetic is in f32, and what
//    a contract calls a statistic, a loss or a weight gradient is f32 (accumulate_dtype()).
//  * On CUDA a call enqueues work on the device's current stream and returns. Inputs that only the
//    device knows (ids, positions) are not checked there; a contract says what a bad one does.
//  * Row ops: the bits of an output row depend on that row's inputs only: not on the other rows,
//    their number or the thread count. Reduction order inside a row is fixed.
//  * Every gradient output says by enum whether it is overwritten or accumulated into.
#pragma once

#include "core/tensor.h"

namespace cohort::kernels {

enum class Grad { kOverwrite, kAccumulate };

// A gradient to write, and how. An undefined tensor: nobody needs this gradient, it is skipped.
struct GradOut {
  Tensor& tensor;
  Grad mode = Grad::kOverwrite;

  bool wanted() const { return tensor.defined(); }
};

// Throws Error unless `t` is contiguous, on `device`, and has this shape and dtype.
void check_tensor(const Tensor& t, const Shape& shape, DType dtype, const char* op,
                  const char* name, Device device = {});
// The same for a gradient, if it is wanted.
void check_grad(const GradOut& grad, const Shape& shape, DType dtype, const char* op,
                const char* name, Device device = {});

}  // namespace cohort::kernels
