// Gradient of a bias on CUDA.
#include "kernels/cuda/column_sum.cuh"
#include "kernels/matmul.h"

namespace cohort::kernels::cuda {
namespace {

// Term of column_sum(): the row of dy.
template <class T>
struct BiasTerm {
  static constexpr int kBatchRows = 4, kBlocks = 5, N = kPackSize<T>;
  const T* dy;

  using Values = Raw<T, N>;
  template <class Location>
  __device__ __forceinline__ Values load(const Location& at) const {
    return at.load(dy);
  }
  template <class Location>
  __device__ __forceinline__ void add(const Location&, const Values& grad, float (&sum)[N]) const {
#pragma unroll
    for (int n = 0; n < N; ++n) sum[n] += element(grad, n);
  }
};

}  // namespace

void bias_backward(const BiasBackward& args) {
  dispatch_device(args.dy.dtype(), "bias_backward", [&]<class T>() {
    const T* in = pointer<T>(args.dy);
    const int64_t cols = args.dy.cols();
    const bool vectorized = aligned(in) && cols % kPackSize<T> == 0;
    column_sum<T>("bias_backward", BiasTerm<T>{in}, args.dy.rows(), cols, vectorized, args.dbias);
  });
}

}  // namespace cohort::kernels::cuda
