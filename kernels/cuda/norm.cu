// Forward of the row norms on CUDA. The row stays in registers, so that it is read once; rows of
// more than 2048 packs of 16 bytes (16384 bf16 elements) have a plain kernel.
#include "kernels/cuda/rows.cuh"
#include "kernels/norm.h"

namespace cohort::kernels::cuda {
namespace {

// Arguments of a norm. An RMS norm has no mean and no bias; `b` and `sum` are used by the fused
// residual addition, whose rows are contiguous.
template <class T>
struct NormForward {
  const T *a, *b, *w, *bias;
  T *sum, *y;
  RowOffsets a_rows, y_rows;
  float *mean, *rstd;
  float eps;
  float weight_offset = 0;  // RMS norm only
};

// Loads the row to normalise: a, or a + b, which it also stores.
template <class T, bool kResidual>
__device__ __forceinline__ void load_row(const RowSlice<T>& at, const NormForward<T>& p,
                                         typename RowSlice<T>::Packs& x) {
  constexpr int N = RowSlice<T>::N;
  const int64_t start = p.a_rows(at.row);
  // The loads of a and b are both in flight before the first addition.
  at.load(p.a + start, 0, x);
  if constexpr (kResidual) {
    typename RowSlice<T>::Packs b;
    at.load(p.b + start, 0, b);
#pragma unroll
    for (int u = 0; u < kRowPacks; ++u) {
      float sum[N];
#pragma unroll
      for (int n = 0; n < N; ++n) sum[n] = element(x[u], n) + element(b[u], n);
      // Rounded to the tensor's type before normalisation, as read by the backward.
      x[u] = to_raw<T>(sum);
      at.store(p.sum + start, 0, u, x[u]);
    }
  }
}

// A block has one row, or several short ones; a thread keeps its packs of the row in registers.
// Grid: blocks of rows. The row is loaded (with a residual it is added, rounded and stored first,
// and the norm uses the stored values), reduced to its mean square, or to its mean and then its
// variance, and scaled.
template <class T, bool kLayer, bool kResidual>
__global__ void __launch_bounds__(kMaxGroup)
    norm_forward_kernel(const NormForward<T> p, const RowLayout layout) {
  launch_dependents_and_wait();
  constexpr int N = RowSlice<T>::N;
  __shared__ float scratch[2][32];
  const RowSlice<T> at(layout);
  const auto cols = static_cast<float>(layout.cols);
  typename RowSlice<T>::Packs x, w, bias{};

  at.load(p.w, 0, w);  // in flight together with the row
  load_row<T, kResidual>(at, p, x);
  float sum = 0;  // layer norm: sum of elements; RMS norm: sum of squares
#pragma unroll
  for (int u = 0; u < kRowPacks; ++u)
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float v = element(x[u], n);
      sum = kLayer ? sum + v : fmaf(v, v, sum);
    }
  sum = group_reduce(sum, at.group, scratch[0], Plus{});
  float mean = 0, squares = sum;
  if constexpr (kLayer) {
    mean = sum / cols;
    if (p.bias != nullptr) at.load(p.bias, 0, bias);  // in flight during the second reduction
    // From differences to the mean, because mean(x^2) - mean(x)^2 suffers from cancellation.
    // Elements past the row are excluded.
    squares = 0;
#pragma unroll
    for (int u = 0; u < kRowPacks; ++u)
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float d = element(x[u], n) - mean;
        if (at.column(0, u) + n < at.cols) squares = fmaf(d, d, squares);
      }
    squares = group_reduce(squares, at.group, scratch[1], Plus{});
    if (at.is_leader()) p.mean[at.row] = mean;
  }
  const float rstd = 1.0f / sqrtf(squares / cols + p.eps);
  if (at.is_leader()) p.rstd[at.row] = rstd;

#pragma unroll
  for (int u = 0; u < kRowPacks; ++u) {
    float y[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const float weight = kLayer ? element(w[u], n) : element(w[u], n) + p.weight_offset;
      y[n] = (element(x[u], n) - mean) * rstd * weight;
      if (kLayer && p.bias != nullptr) y[n] += element(bias[u], n);
    }
    at.store(p.y + p.y_rows(at.row), 0, u, to_raw<T>(y));
  }
}

// Any norm of rows that do not fit into registers. A block has one row, and reads it again for each
// step.
template <class T>
__global__ void __launch_bounds__(kMaxGroup) long_rows_kernel(const NormForward<T> p, int cols) {
  launch_dependents_and_wait();
  __shared__ float scratch[2][kMaxGroup / 32];
  const int64_t row = blockIdx.x, start = p.a_rows(row);
  const T* x = p.a + start;
  if (p.sum != nullptr) {
    for (int c = threadIdx.x; c < cols; c += kMaxGroup)
      p.sum[start + c] = from_float<T>(to_float(x[c]) + to_float(p.b[start + c]));
    x = p.sum + start;  // a thread reads the elements that it has written
  }
  const auto mean_of = [&](float* shared, auto&& term) {
    float sum = 0;
    for (int c = threadIdx.x; c < cols; c += kMaxGroup) sum += term(to_float(x[c]));
    return block_reduce<kMaxGroup>(sum, shared, Plus{}) / static_cast<float>(cols);
  };
  float mean = 0;
  if (p.mean != nullptr) mean = mean_of(scratch[0], [](float v) { return v; });
  const float mean_square = mean_of(scratch[1], [=](float v) { return (v - mean) * (v - mean); });
  const float rstd = 1.0f / sqrtf(mean_square + p.eps);
  if (threadIdx.x == 0) {
    if (p.mean != nullptr) p.mean[row] = mean;
    p.rstd[row] = rstd;
  }
  T* y = p.y + p.y_rows(row);
  for (int c = threadIdx.x; c < cols; c += kMaxGroup) {
    const float bias = p.bias != nullptr ? to_float(p.bias[c]) : 0.0f;
    const float weight = to_float(p.w[c]) + p.weight_offset;
    y[c] = from_float<T>((to_float(x[c]) - mean) * rstd * weight + bias);
  }
}

// `x`: the row to normalise, or the first summand.
template <bool kLayer, bool kResidual, class Args>
void norm_forward(const char* op, const Args& args, const Tensor& x, const Tensor& bias = {}) {
  dispatch_device(x.dtype(), op, [&]<class T>() {
    NormForward<T> p{.a = pointer<T>(x),
                     .w = pointer<T>(args.w),
                     .bias = pointer<T>(bias),
                     .y = pointer<T>(args.y),
                     .a_rows = RowOffsets(x),
                     .y_rows = RowOffsets(args.y),
                     .rstd = pointer<float>(args.rstd),
                     .eps = static_cast<float>(args.eps)};
    if constexpr (kResidual) {
      p.b = pointer<T>(args.b);
      p.sum = pointer<T>(args.sum);
    }
    if constexpr (kLayer)
      p.mean = pointer<float>(args.mean);
    else
      p.weight_offset = static_cast<float>(args.weight_offset);
    const bool vectorized = vectorized_rows(x.cols(), p.a, p.b, p.w, p.bias, p.sum, p.y) &&
                            vectorized_starts<T>(p.a_rows) && vectorized_starts<T>(p.y_rows);
    const RowLayout layout = row_layout<T>(x.rows(), x.cols(), vectorized);
    if (layout.tiles > 1)
      launch(op, long_rows_kernel<T>,
             {.grid = blocks_for(x.rows(), 1), .block = kMaxGroup, .start = Start::kProgrammatic},
             x.device(), p, layout.cols);
    else
      launch(op, norm_forward_kernel<T, kLayer, kResidual>,
             layout.launch_shape(Start::kProgrammatic), x.device(), p, layout);
  });
}

}  // namespace

void rms_norm_forward(const RmsNormForward& args) {
  norm_forward<false, false>("rms_norm", args, args.x);
}

void add_rms_norm_forward(const AddRmsNormForward& args) {
  norm_forward<false, true>("add_rms_norm", args, args.a);
}

void layer_norm_forward(const LayerNormForward& args) {
  norm_forward<true, false>("layer_norm", args, args.x, args.b);
}

void add_layer_norm_forward(const AddLayerNormForward& args) {
  norm_forward<true, true>("add_layer_norm", args, args.a, args.bias);
}

}  // namespace cohort::kernels::cuda
