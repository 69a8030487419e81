// Row normalisations on the CPU. One row at a time in the lane order of reduce.h; weight gradients
// are summed over fixed blocks of rows. An RMS norm is a layer norm whose mean is 0, and has the
// same loops.
#include "kernels/norm.h"

#include <cmath>

#include "kernels/cpu/reduce.h"
#include "kernels/elementwise.h"
#include "kernels/matmul.h"

namespace cohort::kernels::cpu {
namespace {

// The mean of a row; 0 in an RMS norm.
template <bool kLayer, class T>
T mean_of(const T* x, int64_t cols) {
  if constexpr (!kLayer) return T(0);
  return lane_sum<T>(cols, [&](int64_t c) { return x[c]; }) / static_cast<T>(cols);
}

// Offset of the weights; 0 in a layer norm.
template <class T, bool kLayer, class Args>
T weight_offset_of(const Args& args) {
  if constexpr (kLayer)
    return T(0);
  else
    return static_cast<T>(args.weight_offset);
}

// `mean` and `bias` may be null.
template <bool kLayer, class Args>
void forward(const Args& args, Tensor* mean, const Tensor* bias) {
  dispatch_float(args.x.dtype(), "norm", [&]<class T>() {
    const int64_t rows = args.x.rows(), cols = args.x.cols();
    const T *px = args.x.template data<T>(), *weight = args.w.template data<T>();
    const T* shift = bias != nullptr && bias->defined() ? bias->data<T>() : nullptr;
    T *py = args.y.template data<T>(), *prstd = args.rstd.template data<T>();
    T* pmean = mean != nullptr ? mean->data<T>() : nullptr;
    const T offset = weight_offset_of<T, kLayer>(args);
    const RowOffsets x_rows(args.x), y_rows(args.y);
    for_rows(rows, cols, [&](int64_t r) {
      const T* in = px + x_rows(r);
      T* out = py + y_rows(r);
      const T m = mean_of<kLayer>(in, cols);
      const T squares = lane_sum<T>(cols, [&](int64_t c) { return (in[c] - m) * (in[c] - m); });
      const T s = T(1) / std::sqrt(squares / static_cast<T>(cols) + static_cast<T>(args.eps));
      if (pmean != nullptr) pmean[r] = m;
      prstd[r] = s;
      if (shift != nullptr)
        write_range(out, 0, cols, Grad::kOverwrite,
                    [=](int64_t c) { return (in[c] - m) * s * weight[c] + shift[c]; });
      else
        write_range(out, 0, cols, Grad::kOverwrite,
                    [=](int64_t c) { return (in[c] - m) * s * (weight[c] + offset); });
    });
  });
}

// dx and dw; `mean` may be null.
template <bool kLayer, class Args>
void backward(const Args& args, const Tensor* mean) {
  dispatch_float(args.x.dtype(), "norm_backward", [&]<class T>() {
    const int64_t rows = args.x.rows(), cols = args.x.cols();
    const T *px = args.x.template data<T>(), *pdy = args.dy.template data<T>(),
            *weight = args.w.template data<T>(), *prstd = args.rstd.template data<T>();
    const T* pmean = mean != nullptr ? mean->data<T>() : nullptr;
    const T offset = weight_offset_of<T, kLayer>(args);
    const RowOffsets x_rows(args.x), dy_rows(args.dy);
    const auto mean_of_row = [=](int64_t r) { return kLayer ? pmean[r] : T(0); };
    if (args.dx.wanted()) {
      T* pdx = args.dx.tensor.template data<T>();
      const RowOffsets dx_rows(args.dx.tensor);
      for_rows(rows, cols, [&](int64_t r) {
        const T *in = px + x_rows(r), *grad = pdy + dy_rows(r);
        const T m = mean_of_row(r), s = prstd[r], n = static_cast<T>(cols);
        T mean_dy_w = 0;
        if constexpr (kLayer)
          mean_dy_w = lane_sum<T>(cols, [&](int64_t c) { return grad[c] * weight[c]; }) / n;
        const T dot = lane_sum<T>(
            cols, [&](int64_t c) { return grad[c] * (weight[c] + offset) * (in[c] - m); });
        const T dot_scaled = dot * s * s / n;
        write_range(pdx + dx_rows(r), 0, cols, args.dx.mode, [=](int64_t c) {
          return s * (grad[c] * (weight[c] + offset) - mean_dy_w - (in[c] - m) * dot_scaled);
        });
      });
    }
    if (args.dw.wanted())
      column_sum(args.dw.tensor.template data<T>(), rows, cols, args.dw.mode,
                 [&](int64_t begin, int64_t end, T* partial) {
                   for (int64_t r = begin; r < end; ++r) {
                     const T *in = px + x_rows(r), *grad = pdy + dy_rows(r);
                     const T m = mean_of_row(r), s = prstd[r];
                     COHORT_VECTORIZE
                     for (int64_t c = 0; c < cols; ++c) partial[c] += grad[c] * ((in[c] - m) * s);
                   }
                 });
  });
}

}  // namespace

void rms_norm_forward(const RmsNormForward& args) {
  forward<false>(args, nullptr, nullptr);
}
void rms_norm_backward(const RmsNormBackward& args) {
  backward<false>(args, nullptr);
}

void layer_norm_forward(const LayerNormForward& args) {
  forward<true>(args, &args.mean, &args.b);
}
void layer_norm_backward(const LayerNormBackward& args) {
  backward<true>(args, &args.mean);
  if (args.db.wanted()) bias_backward({.dbias = args.db, .dy = args.dy});
}

void add_rms_norm_forward(const AddRmsNormForward& args) {
  add_forward({.y = args.sum, .a = args.a, .b = args.b});
  rms_norm_forward({.y = args.y,
                    .rstd = args.rstd,
                    .x = args.sum,
                    .w = args.w,
                    .eps = args.eps,
                    .weight_offset = args.weight_offset});
}
void add_layer_norm_forward(const AddLayerNormForward& args) {
  add_forward({.y = args.sum, .a = args.a, .b = args.b});
  layer_norm_forward({.y = args.y,
                      .mean = args.mean,
                      .rstd = args.rstd,
                      .x = args.sum,
                      .w = args.w,
                      .b = args.bias,
                      .eps = args.eps});
}

}  // namespace cohort::kernels::cpu
