// Sums of rows on CUDA: a group of threads per row, each with 16-byte packs of it.
#include "kernels/cuda/rows.cuh"
#include "kernels/row_sum.h"

namespace cohort::kernels::cuda {
namespace {

template <class T>
__global__ void __launch_bounds__(kMaxGroup)
    row_sum_kernel(float* y, const T* x, const RowLayout layout) {
  launch_dependents_and_wait();
  constexpr int N = RowSlice<T>::N;
  __shared__ float scratch[32];
  const RowSlice<T> at(layout);
  const T* start = x + at.row * layout.cols;
  float sum = 0;
  for (int tile = 0; tile < layout.tiles; ++tile) {
    typename RowSlice<T>::Packs packs;
    at.load(start, tile, packs);
#pragma unroll
    for (int u = 0; u < kRowPacks; ++u)
#pragma unroll
      for (int n = 0; n < N; ++n) sum += element(packs[u], n);
  }
  sum = group_reduce(sum, at.group, scratch, Plus{});
  if (at.is_leader()) y[at.row] = sum;
}

template <class T>
__global__ void __launch_bounds__(kMaxGroup)
    row_sum_backward_kernel(T* dx, const float* dy, bool accumulate, const RowLayout layout) {
  launch_dependents_and_wait();
  constexpr int N = RowSlice<T>::N;
  const RowSlice<T> at(layout);
  if (at.cols == 0) return;
  T* start = dx + at.row * layout.cols;
  const float value = dy[at.row];
  for (int tile = 0; tile < layout.tiles; ++tile) {
    typename RowSlice<T>::Packs old = {};
    if (accumulate) at.load(start, tile, old);
#pragma unroll
    for (int u = 0; u < kRowPacks; ++u) {
      float sum[N];
#pragma unroll
      for (int n = 0; n < N; ++n) sum[n] = element(old[u], n) + value;
      at.store(start, tile, u, to_raw<T>(sum));
    }
  }
}

}  // namespace

void row_sum_forward(const RowSumForward& args) {
  dispatch_device(args.x.dtype(), "row_sum", [&]<class T>() {
    const T* x = pointer<T>(args.x);
    const int64_t cols = args.x.cols();
    const RowLayout layout = row_layout<T>(args.x.rows(), cols, vectorized_rows(cols, x));
    launch("row_sum", row_sum_kernel<T>, layout.launch_shape(Start::kProgrammatic), args.x.device(),
           pointer<float>(args.y), x, layout);
  });
}

void row_sum_backward(const RowSumBackward& args) {
  Tensor& dx = args.dx.tensor;
  dispatch_device(dx.dtype(), "row_sum_backward", [&]<class T>() {
    T* out = pointer<T>(dx);
    const int64_t cols = dx.cols();
    const RowLayout layout = row_layout<T>(dx.rows(), cols, vectorized_rows(cols, out));
    launch("row_sum_backward", row_sum_backward_kernel<T>,
           layout.launch_shape(Start::kProgrammatic), dx.device(), out, pointer<float>(args.dy),
           args.dx.mode == Grad::kAccumulate, layout);
  });
}

}  // namespace cohort::kernels::cuda
