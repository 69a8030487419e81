// Conventions of every kernel in this folder.
//
//  * kernels/<op>.h is the contract: one struct of arguments per call, outputs before inputs, and
//    the functions that take it, declared by COHORT_KERNEL(). kernels::op() checks the arguments
//    (kernels/<op>.cpp) and calls cpu::op() (kernels/cpu/) or cuda::op() (kernels/cuda/), which
//    rely on these checks.
//  * A kernel is a pure function on tensors: it writes its outputs, allocates no tensor that
//    outlives it, and takes shapes from the tensors. Inputs and outputs are contiguous unless a
//    contract says otherwise.
//  * A mismatch of shape or dtype throws Error("[op] ...") before anything is written.
//  * CPU tensors are f64 or f32, CUDA tensors f32 or bf16; all tensors of a call share one dtype
//    and device unless a contract says otherwise. With bf16 tensors, arithmetic is in f32, and what
//    a contract calls a statistic, a loss or a weight gradient is f32 (accumulate_dtype()).
//  * On CUDA a call enqueues work on the device's current stream and returns. Input values (ids,
//    positions) are not checked there; a contract says what an invalid one does.
//  * Row ops: the bits of an output row depend on that row's inputs only, not on the other rows,
//    their number or the thread count. The reduction order inside a row is fixed.
//  * Every gradient output says by enum whether it is overwritten or accumulated into.
//  * With Stream::may_prefetch, CUDA kernels may prefetch some inputs before the grids they depend
//    on have ended (programmatic dependent launch): skinny GEMMs their weights, lora_input() its a,
//    attention_decode() the cache, its scales and block table, sequences and positions. Every write
//    to these must have been enqueued before the last embedding_forward(), at which later kernels
//    wait; otherwise they read old values. attention_decode() writes the cache itself, but takes
//    the key and value of its own token from qkv.
#pragma once

#include "core/host_device.h"
#include "core/tensor.h"

// Declares a function in kernels, kernels::cpu and kernels::cuda:
//
//   COHORT_KERNEL(void rope(const Rope& args));
#define COHORT_KERNEL(...) \
  namespace cpu {          \
  __VA_ARGS__;             \
  }                        \
  namespace cuda {         \
  __VA_ARGS__;             \
  }                        \
  __VA_ARGS__

namespace cohort::kernels {

class ArgumentCheck;

enum class Grad { kOverwrite, kAccumulate };

// A gradient to write, and how. An undefined tensor means that this gradient is not needed.
struct GradOut {
  Tensor& tensor;
  Grad mode = Grad::kOverwrite;

  bool wanted() const { return tensor.defined(); }
};

// Throws Error unless `t` is contiguous, on `device`, and has this shape and dtype. Ops check their
// arguments by kernels/arguments.h.
void check_tensor(const Tensor& t, const Shape& shape, DType dtype, const char* op,
                  const char* name, Device device = {});
// Data pointer as T, null for an undefined tensor. The caller has checked the dtype.
template <class T>
T* pointer(Tensor& t) {
  return t.defined() ? static_cast<T*>(t.raw()) : nullptr;
}
template <class T>
const T* pointer(const Tensor& t) {
  return t.defined() ? static_cast<const T*>(t.raw()) : nullptr;
}
// Offsets of rows, in elements, in a tensor of layout "strided" (kernels/arguments.h).
struct RowOffsets {
  int64_t inner = 1;  // rows per t[i]
  int64_t outer = 0;  // stride from t[i] to t[i + 1]
  int64_t cols = 0;

  RowOffsets() = default;
  explicit RowOffsets(const Tensor& t) {
    if (!t.defined()) return;
    outer = cols = t.cols();
    if (t.rank() < 2 || t.is_contiguous()) return;
    inner = t.dim(0) == 0 ? 1 : t.rows() / t.dim(0);
    outer = t.strides()[0];
  }
  COHORT_HD int64_t operator()(int64_t row) const {
    return inner == 1 ? row * outer : row / inner * outer + row % inner * cols;
  }
};

}  // namespace cohort::kernels
