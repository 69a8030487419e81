// Means over the tokens of sequences on CUDA: a thread per element of the result.
#include "kernels/cuda/device.cuh"
#include "kernels/pooling.h"

namespace cohort::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void __launch_bounds__(kThreads)
    segment_mean_kernel(float* y, const T* x, const int32_t* cu_seqlens, int64_t elements,
                        int cols) {
  wait_on_dependent_grids();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= elements) return;
  const int64_t s = i / cols, c = i % cols;
  const int begin = cu_seqlens[s], end = cu_seqlens[s + 1];
  float sum = 0;
  for (int64_t t = begin; t < end; ++t) sum += to_float(x[t * cols + c]);
  y[i] = __fdiv_rn(sum, static_cast<float>(end - begin));
}

}  // namespace

void segment_mean(const SegmentMean& args) {
  dispatch_device(args.x.dtype(), "segment_mean", [&]<class T>() {
    launch("segment_mean", segment_mean_kernel<T>, {blocks_for(args.y.numel(), kThreads), kThreads},
           args.y.device(), pointer<float>(args.y), pointer<T>(args.x),
           pointer<int32_t>(args.cu_seqlens), args.y.numel(), static_cast<int>(args.y.dim(1)));
  });
}

}  // namespace cohort::kernels::cuda
