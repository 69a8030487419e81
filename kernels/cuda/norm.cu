// Forward of the row norms, and softmax, on CUDA. The row stays in registers, so that it is read
// once; rows of more than 2048 packs of 16 bytes (16384 bf16 elements) are read again for each
// step.
#include <cmath>

#include "kernels/cuda/rows.cuh"
#include "kernels/norm.h"
#include "kernels/vector_math.h"

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

// Loads a tile of the row to normalise: a, or a + b, which it also stores.
template <class T, bool kResidual>
__device__ __forceinline__ void load_row(const RowSlice<T>& at, const NormForward<T>& p,
                                         int64_t start, int tile, typename RowSlice<T>::Packs& x) {
  constexpr int N = RowSlice<T>::N;
  // The loads of a and b are both in flight before the first addition.
  at.load(p.a + start, tile, x);
  if constexpr (kResidual) {
    typename RowSlice<T>::Packs b;
    at.load(p.b + start, tile, b);
#pragma unroll
    for (int u = 0; u < kRowPacks; ++u) {
      float sum[N];
#pragma unroll
      for (int n = 0; n < N; ++n) sum[n] = element(x[u], n) + element(b[u], n);
      // Rounded to the tensor's type before normalisation, as read by the backward and by later
      // loads of the tile.
      x[u] = to_raw<T>(sum);
      at.store(p.sum + start, tile, u, x[u]);
    }
  }
}

// A block has one row, or several short ones; a thread keeps its packs of the row in registers.
// Grid: blocks of rows. The row is loaded (with a residual it is added, rounded and stored first,
// and the norm uses the stored values), reduced to its mean square, or to its mean and then its
// variance, and scaled; rows of several tiles are read again for each step.
template <class T, bool kLayer, bool kResidual>
__global__ void __launch_bounds__(kMaxGroup)
    norm_forward_kernel(const NormForward<T> p, const RowLayout layout) {
  launch_dependents_and_wait();
  constexpr int N = RowSlice<T>::N;
  __shared__ float scratch[2][32];
  const RowSlice<T> at(layout);
  const int64_t start = p.a_rows(at.row);
  const T* stored = (kResidual ? p.sum : p.a) + start;
  const auto cols = static_cast<float>(layout.cols);
  typename RowSlice<T>::Packs x, w;

  if (layout.tiles == 1) at.load(p.w, 0, w);  // in flight together with the row
  float sum = 0;  // layer norm: sum of elements; RMS norm: sum of squares
  for (int tile = 0; tile < layout.tiles; ++tile) {
    load_row<T, kResidual>(at, p, start, tile, x);
#pragma unroll
    for (int u = 0; u < kRowPacks; ++u)
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float v = element(x[u], n);
        sum = kLayer ? sum + v : fmaf(v, v, sum);
      }
  }
  sum = group_reduce(sum, at.group, scratch[0], Plus{});
  float mean = 0, squares = sum;
  if constexpr (kLayer) {
    mean = sum / cols;
    // From differences to the mean, because mean(x^2) - mean(x)^2 suffers from cancellation.
    // Elements past the row are excluded.
    squares = 0;
    for (int tile = 0; tile < layout.tiles; ++tile) {
      if (layout.tiles > 1) at.load(stored, tile, x);
      at.each(tile, [&](int u, int n) {
        const float d = element(x[u], n) - mean;
        squares = fmaf(d, d, squares);
      });
    }
    squares = group_reduce(squares, at.group, scratch[1], Plus{});
    if (at.is_leader()) p.mean[at.row] = mean;
  }
  const float rstd = 1.0f / sqrtf(squares / cols + p.eps);
  if (at.is_leader()) p.rstd[at.row] = rstd;

  for (int tile = 0; tile < layout.tiles; ++tile) {
    if (layout.tiles > 1) {
      at.load(stored, tile, x);
      at.load(p.w, tile, w);
    }
    typename RowSlice<T>::Packs bias{};
    if (kLayer && p.bias != nullptr) at.load(p.bias, tile, bias);
#pragma unroll
    for (int u = 0; u < kRowPacks; ++u) {
      float y[N];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const float weight = kLayer ? element(w[u], n) : element(w[u], n) + p.weight_offset;
        y[n] = (element(x[u], n) - mean) * rstd * weight;
        if (kLayer && p.bias != nullptr) y[n] += element(bias[u], n);
      }
      at.store(p.y + p.y_rows(at.row), tile, u, to_raw<T>(y));
    }
  }
}

// Pack of -inf, the padding of softmax past the end of a row.
template <class T, int N>
__device__ __forceinline__ Raw<T, N> minus_infinity() {
  Raw<T, N> raw;
#pragma unroll
  for (int k = 0; k < Raw<T, N>::kWords; ++k)
    raw.word[k] = sizeof(T) == 4 ? 0xff800000u : 0xff80ff80u;
  return raw;
}

// A block has one row or several. Steps on a row in registers: its largest element, the
// exponentials of the differences to it, their sum. The exponentials stay in registers for the
// normalisation; rows of several tiles compute them again.
template <class T>
__global__ void __launch_bounds__(kMaxGroup)
    softmax_forward_kernel(T* y, const T* x, const RowLayout layout) {
  constexpr int N = RowSlice<T>::N;
  __shared__ float scratch[2][32];
  const RowSlice<T> at(layout);
  const int64_t start = at.row * layout.cols;
  const auto past = minus_infinity<T, N>();
  typename RowSlice<T>::Packs in;

  // 1. Largest element.
  float largest = -INFINITY;
  for (int tile = 0; tile < layout.tiles; ++tile) {
    at.load(x + start, tile, in, past);
#pragma unroll
    for (int u = 0; u < kRowPacks; ++u)
#pragma unroll
      for (int n = 0; n < N; ++n) largest = fmaxf(largest, element(in[u], n));
  }
  largest = group_reduce(largest, at.group, scratch[0], Larger{});

  // 2. Exponentials and their sum. A row of several tiles is loaded again. Past the row e^-inf adds
  // 0.
  float e[kRowPacks][N], sum = 0;
  const auto exponentials = [&](int tile) {
    if (layout.tiles > 1) at.load(x + start, tile, in, past);
#pragma unroll
    for (int u = 0; u < kRowPacks; ++u)
#pragma unroll
      for (int n = 0; n < N; ++n) e[u][n] = vexp(element(in[u], n) - largest);
  };
  for (int tile = 0; tile < layout.tiles; ++tile) {
    exponentials(tile);
#pragma unroll
    for (int u = 0; u < kRowPacks; ++u)
#pragma unroll
      for (int n = 0; n < N; ++n) sum += e[u][n];
  }
  // One division per row instead of one per element.
  const float inverse = 1.0f / group_reduce(sum, at.group, scratch[1], Plus{});
  // 3. Probabilities, rounded once.
  for (int tile = 0; tile < layout.tiles; ++tile) {
    if (layout.tiles > 1) exponentials(tile);
#pragma unroll
    for (int u = 0; u < kRowPacks; ++u) {
#pragma unroll
      for (int n = 0; n < N; ++n) e[u][n] *= inverse;
      at.store(y + start, tile, u, to_raw<T>(e[u]));
    }
  }
}

// dx = y (dy - sum(dy y)): a block has one row or several, and a thread keeps its packs of dy and y
// in registers. If dx is accumulated, its old value is loaded only after the reduction to save
// registers.
template <class T>
__global__ void __launch_bounds__(kMaxGroup)
    softmax_backward_kernel(T* dx, const T* dy, const T* y, bool accumulate,
                            const RowLayout layout) {
  constexpr int N = RowSlice<T>::N;
  __shared__ float scratch[32];
  const RowSlice<T> at(layout);
  const int64_t start = at.row * layout.cols;
  typename RowSlice<T>::Packs grad, prob;

  // 1. Dot product of the row. Both operands are 0 past the row.
  float dot = 0;
  for (int tile = 0; tile < layout.tiles; ++tile) {
    at.load(dy + start, tile, grad);
    at.load(y + start, tile, prob);
#pragma unroll
    for (int u = 0; u < kRowPacks; ++u)
#pragma unroll
      for (int n = 0; n < N; ++n) dot = fmaf(element(grad[u], n), element(prob[u], n), dot);
  }
  // 2. dx, from registers if the row has one tile.
  dot = group_reduce(dot, at.group, scratch, Plus{});
  for (int tile = 0; tile < layout.tiles; ++tile) {
    if (layout.tiles > 1) {
      at.load(dy + start, tile, grad);
      at.load(y + start, tile, prob);
    }
    typename RowSlice<T>::Packs old{};
    if (accumulate) at.load(dx + start, tile, old);
#pragma unroll
    for (int u = 0; u < kRowPacks; ++u) {
      float out[N];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        out[n] = element(prob[u], n) * (element(grad[u], n) - dot);
        if (accumulate) out[n] += element(old[u], n);
      }
      at.store(dx + start, tile, u, to_raw<T>(out));
    }
  }
}

template <class T, bool kLayer, bool kResidual>
void norm_forward(const char* name, const Tensor& x, const NormForward<T>& p) {
  const bool vectorized = vectorized_rows(x.cols(), p.a, p.b, p.w, p.bias, p.sum, p.y) &&
                          vectorized_starts<T>(p.a_rows) && vectorized_starts<T>(p.y_rows);
  const RowLayout layout = row_layout<T>(x.rows(), x.cols(), vectorized);
  launch(name, norm_forward_kernel<T, kLayer, kResidual>, layout.launch_shape(Start::kProgrammatic),
         x.device(), p, layout);
}

}  // namespace

void rms_norm_forward(const RmsNormForward& args) {
  dispatch_device(args.x.dtype(), "rms_norm", [&]<class T>() {
    norm_forward<T, false, false>("rms_norm", args.x,
                                  {.a = pointer<T>(args.x),
                                   .w = pointer<T>(args.w),
                                   .y = pointer<T>(args.y),
                                   .a_rows = RowOffsets(args.x),
                                   .y_rows = RowOffsets(args.y),
                                   .rstd = pointer<float>(args.rstd),
                                   .eps = static_cast<float>(args.eps),
                                   .weight_offset = static_cast<float>(args.weight_offset)});
  });
}

void add_rms_norm_forward(const AddRmsNormForward& args) {
  dispatch_device(args.a.dtype(), "add_rms_norm", [&]<class T>() {
    norm_forward<T, false, true>("add_rms_norm", args.a,
                                 {.a = pointer<T>(args.a),
                                  .b = pointer<T>(args.b),
                                  .w = pointer<T>(args.w),
                                  .sum = pointer<T>(args.sum),
                                  .y = pointer<T>(args.y),
                                  .a_rows = RowOffsets(args.a),
                                  .y_rows = RowOffsets(args.y),
                                  .rstd = pointer<float>(args.rstd),
                                  .eps = static_cast<float>(args.eps),
                                  .weight_offset = static_cast<float>(args.weight_offset)});
  });
}

void layer_norm_forward(const LayerNormForward& args) {
  dispatch_device(args.x.dtype(), "layer_norm", [&]<class T>() {
    norm_forward<T, true, false>("layer_norm", args.x,
                                 {.a = pointer<T>(args.x),
                                  .w = pointer<T>(args.w),
                                  .bias = pointer<T>(args.b),
                                  .y = pointer<T>(args.y),
                                  .a_rows = RowOffsets(args.x),
                                  .y_rows = RowOffsets(args.y),
                                  .mean = pointer<float>(args.mean),
                                  .rstd = pointer<float>(args.rstd),
                                  .eps = static_cast<float>(args.eps)});
  });
}

void add_layer_norm_forward(const AddLayerNormForward& args) {
  dispatch_device(args.a.dtype(), "add_layer_norm", [&]<class T>() {
    norm_forward<T, true, true>("add_layer_norm", args.a,
                                {.a = pointer<T>(args.a),
                                 .b = pointer<T>(args.b),
                                 .w = pointer<T>(args.w),
                                 .bias = pointer<T>(args.bias),
                                 .sum = pointer<T>(args.sum),
                                 .y = pointer<T>(args.y),
                                 .a_rows = RowOffsets(args.a),
                                 .y_rows = RowOffsets(args.y),
                                 .mean = pointer<float>(args.mean),
                                 .rstd = pointer<float>(args.rstd),
                                 .eps = static_cast<float>(args.eps)});
  });
}

void softmax_forward(const SoftmaxForward& args) {
  dispatch_device(args.x.dtype(), "softmax", [&]<class T>() {
    const T* in = pointer<T>(args.x);
    T* out = pointer<T>(args.y);
    const RowLayout layout =
        row_layout<T>(args.x.rows(), args.x.cols(), vectorized_rows(args.x.cols(), in, out));
    launch("softmax", softmax_forward_kernel<T>, layout.launch_shape(), args.x.device(), out, in,
           layout);
  });
}

void softmax_backward(const SoftmaxBackward& args) {
  dispatch_device(args.y.dtype(), "softmax_backward", [&]<class T>() {
    const T *grad = pointer<T>(args.dy), *prob = pointer<T>(args.y);
    T* out = pointer<T>(args.dx.tensor);
    const RowLayout layout = row_layout<T>(args.y.rows(), args.y.cols(),
                                           vectorized_rows(args.y.cols(), grad, prob, out));
    launch("softmax_backward", softmax_backward_kernel<T>, layout.launch_shape(), args.y.device(),
           out, grad, prob, args.dx.mode == Grad::kAccumulate, layout);
  });
}

}  // namespace cohort::kernels::cuda
