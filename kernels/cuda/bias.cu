// Gradient of a bias on CUDA.
#include "kernels/cuda/column_sum.cuh"
#include "kernels/matmul.h"

namespace cohort::kernels::cuda {
void bias_backward(const BiasBackward& args) {
  dispatch_device(args.dy.dtype(), "bias_backward", [&]<class T>() {
    const T* in = pointer<T>(args.dy);
    const int64_t cols = args.dy.cols();
    const bool vectorized = aligned(in) && cols % kPackSize<T> == 0;
    column_sum<T>("bias_backward", RowsTerm<T>{in}, args.dy.rows(), cols, vectorized, args.dbias);
  });
}

}  // namespace cohort::kernels::cuda
