// The gradient of a bias on CUDA.
#include "kernels/column_sum.cuh"
#include "kernels/matmul.h"

namespace cohort::kernels::cuda {
namespace {

template <class T>
struct BiasTerm {
  const T* dy;
  template <class Load, int N>
  __device__ __forceinline__ void add(int64_t, const Load& load, float (&sum)[1][N]) const {
    const auto grad = load(dy);
#pragma unroll
    for (int n = 0; n < N; ++n) sum[0][n] += element(grad, n);
  }
};

}  // namespace

void bias_backward(Tensor& dbias, const Tensor& dy, Grad mode) {
  dispatch_device(dy.dtype(), "bias_backward", [&]<class T>() {
    const T* in = pointer<T>(dy);
    const int64_t cols = dy.cols();
    const bool wide = aligned(in) && cols % kPackSize<T> == 0;
    column_sum<T, BiasTerm<T>, 1>("bias_backward", BiasTerm<T>{in}, dy.rows(), cols, wide, {&dbias},
                                  {mode});
  });
}

}  // namespace cohort::kernels::cuda
