// Row normalisations and softmax on the CPU. One row at a time in the lane order of reduce.h;
// weight gradients are summed over fixed blocks of rows.
#include <cmath>

#include "core/parallel.h"
#include "kernels/cuda_dispatch.h"
#include "kernels/elementwise.h"
#include "kernels/norm.h"
#include "kernels/reduce.h"
#include "kernels/vector_math.h"

namespace cohort::kernels {
namespace {

template <class F>
void for_rows(int64_t rows, int64_t cols, F&& fn) {
  parallel_for(rows, row_grain(cols), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) fn(r);
  });
}

// out[c] (+)= value(c).
template <class T, class F>
void write_row(T* out, int64_t cols, Grad mode, F&& value) {
  if (mode == Grad::kOverwrite) {
    COHORT_VECTORIZE
    for (int64_t c = 0; c < cols; ++c) out[c] = value(c);
  } else {
    COHORT_VECTORIZE
    for (int64_t c = 0; c < cols; ++c) out[c] += value(c);
  }
}

// Checks what every norm's forward takes.
void check_forward(const Tensor& y, const Tensor& rstd, const Tensor& x, const Tensor& w,
                   const char* op) {
  const Device device = x.device();
  check_tensor(x, x.shape(), x.dtype(), op, "x", device);
  check_tensor(w, {x.cols()}, x.dtype(), op, "w", device);
  check_tensor(y, x.shape(), x.dtype(), op, "y", device);
  check_tensor(rstd, {x.rows()}, accumulate_dtype(x.dtype()), op, "rstd", device);
}
// What a layer norm's forward takes besides.
void check_mean_and_bias(const Tensor& mean, const Tensor& x, const Tensor& b, const char* op) {
  if (b.defined()) check_tensor(b, {x.cols()}, x.dtype(), op, "b", x.device());
  check_tensor(mean, {x.rows()}, accumulate_dtype(x.dtype()), op, "mean", x.device());
}
// What the fused residual step takes besides.
void check_sum(const Tensor& sum, const Tensor& a, const Tensor& b, const char* op) {
  check_tensor(b, a.shape(), a.dtype(), op, "b", a.device());
  check_tensor(sum, a.shape(), a.dtype(), op, "sum", a.device());
}

// Checks what every norm's backward takes; an undefined gradient is skipped.
void check_backward(const Tensor& dx, const Tensor& dw, const Tensor& dy, const Tensor& x,
                    const Tensor& w, const Tensor& rstd, const char* op) {
  const Device device = x.device();
  const DType dtype = x.dtype(), sums = accumulate_dtype(dtype);
  check_tensor(x, x.shape(), dtype, op, "x", device);
  check_tensor(dy, x.shape(), dtype, op, "dy", device);
  check_tensor(w, {x.cols()}, dtype, op, "w", device);
  check_tensor(rstd, {x.rows()}, sums, op, "rstd", device);
  if (dx.defined()) check_tensor(dx, x.shape(), dtype, op, "dx", device);
  if (dw.defined()) check_tensor(dw, {x.cols()}, sums, op, "dw", device);
}

}  // namespace

COHORT_DECLARE_CUDA(rms_norm_forward)
void rms_norm_forward(Tensor& y, Tensor& rstd, const Tensor& x, const Tensor& w, double eps) {
  constexpr const char* kOp = "rms_norm";
  check_forward(y, rstd, x, w, kOp);
  COHORT_FORWARD_TO_CUDA(x, rms_norm_forward(y, rstd, x, w, eps));
  dispatch_float(x.dtype(), kOp, [&]<class T>() {
    const int64_t rows = x.rows(), cols = x.cols();
    const T *px = x.data<T>(), *weight = w.data<T>();
    T *py = y.data<T>(), *prstd = rstd.data<T>();
    for_rows(rows, cols, [&](int64_t r) {
      const T* in = px + r * cols;
      T* out = py + r * cols;
      const T squares = lane_sum<T>(cols, [&](int64_t c) { return in[c] * in[c]; });
      const T s = T(1) / std::sqrt(squares / static_cast<T>(cols) + static_cast<T>(eps));
      prstd[r] = s;
      write_row(out, cols, Grad::kOverwrite, [=](int64_t c) { return in[c] * s * weight[c]; });
    });
  });
}

COHORT_DECLARE_CUDA(rms_norm_backward)
void rms_norm_backward(Tensor& dx, Grad mode_x, Tensor& dw, Grad mode_w, const Tensor& dy,
                       const Tensor& x, const Tensor& w, const Tensor& rstd) {
  constexpr const char* kOp = "rms_norm_backward";
  check_backward(dx, dw, dy, x, w, rstd, kOp);
  COHORT_FORWARD_TO_CUDA(x, rms_norm_backward(dx, mode_x, dw, mode_w, dy, x, w, rstd));
  dispatch_float(x.dtype(), kOp, [&]<class T>() {
    const int64_t rows = x.rows(), cols = x.cols();
    const T *px = x.data<T>(), *pdy = dy.data<T>(), *weight = w.data<T>();
    const T* prstd = rstd.data<T>();
    if (dx.defined()) {
      T* pdx = dx.data<T>();
      for_rows(rows, cols, [&](int64_t r) {
        const T *in = px + r * cols, *grad = pdy + r * cols;
        const T s = prstd[r];
        const T dot = lane_sum<T>(cols, [&](int64_t c) { return grad[c] * weight[c] * in[c]; });
        const T along = dot * s * s / static_cast<T>(cols);
        write_row(pdx + r * cols, cols, mode_x,
                  [=](int64_t c) { return s * (grad[c] * weight[c] - in[c] * along); });
      });
    }
    if (dw.defined())
      column_sum(dw.data<T>(), rows, cols, mode_w, [&](int64_t begin, int64_t end, T* partial) {
        for (int64_t r = begin; r < end; ++r) {
          const T *in = px + r * cols, *grad = pdy + r * cols;
          const T s = prstd[r];
          COHORT_VECTORIZE
          for (int64_t c = 0; c < cols; ++c) partial[c] += grad[c] * (in[c] * s);
        }
      });
  });
}

COHORT_DECLARE_CUDA(layer_norm_forward)
void layer_norm_forward(Tensor& y, Tensor& mean, Tensor& rstd, const Tensor& x, const Tensor& w,
                        const Tensor& b, double eps) {
  constexpr const char* kOp = "layer_norm";
  check_forward(y, rstd, x, w, kOp);
  check_mean_and_bias(mean, x, b, kOp);
  COHORT_FORWARD_TO_CUDA(x, layer_norm_forward(y, mean, rstd, x, w, b, eps));
  dispatch_float(x.dtype(), kOp, [&]<class T>() {
    const int64_t rows = x.rows(), cols = x.cols();
    const T *px = x.data<T>(), *weight = w.data<T>(), *bias = b.defined() ? b.data<T>() : nullptr;
    T *py = y.data<T>(), *pmean = mean.data<T>(), *prstd = rstd.data<T>();
    for_rows(rows, cols, [&](int64_t r) {
      const T* in = px + r * cols;
      T* out = py + r * cols;
      const T m = lane_sum<T>(cols, [&](int64_t c) { return in[c]; }) / static_cast<T>(cols);
      const T squares = lane_sum<T>(cols, [&](int64_t c) { return (in[c] - m) * (in[c] - m); });
      const T s = T(1) / std::sqrt(squares / static_cast<T>(cols) + static_cast<T>(eps));
      pmean[r] = m;
      prstd[r] = s;
      if (bias != nullptr)
        write_row(out, cols, Grad::kOverwrite,
                  [=](int64_t c) { return (in[c] - m) * s * weight[c] + bias[c]; });
      else
        write_row(out, cols, Grad::kOverwrite,
                  [=](int64_t c) { return (in[c] - m) * s * weight[c]; });
    });
  });
}

COHORT_DECLARE_CUDA(layer_norm_backward)
void layer_norm_backward(Tensor& dx, Grad mode_x, Tensor& dw, Grad mode_w, Tensor& db, Grad mode_b,
                         const Tensor& dy, const Tensor& x, const Tensor& w, const Tensor& mean,
                         const Tensor& rstd) {
  constexpr const char* kOp = "layer_norm_backward";
  const DType sums = accumulate_dtype(x.dtype());
  check_backward(dx, dw, dy, x, w, rstd, kOp);
  check_tensor(mean, {x.rows()}, sums, kOp, "mean", x.device());
  if (db.defined()) check_tensor(db, {x.cols()}, sums, kOp, "db", x.device());
  COHORT_FORWARD_TO_CUDA(
      x, layer_norm_backward(dx, mode_x, dw, mode_w, db, mode_b, dy, x, w, mean, rstd));
  dispatch_float(x.dtype(), kOp, [&]<class T>() {
    const int64_t rows = x.rows(), cols = x.cols();
    const T *px = x.data<T>(), *pdy = dy.data<T>(), *weight = w.data<T>();
    const T *pmean = mean.data<T>(), *prstd = rstd.data<T>();
    if (dx.defined()) {
      T* pdx = dx.data<T>();
      for_rows(rows, cols, [&](int64_t r) {
        const T *in = px + r * cols, *grad = pdy + r * cols;
        const T m = pmean[r], s = prstd[r], n = static_cast<T>(cols);
        const T sum = lane_sum<T>(cols, [&](int64_t c) { return grad[c] * weight[c]; }) / n;
        const T dot =
            lane_sum<T>(cols, [&](int64_t c) { return grad[c] * weight[c] * (in[c] - m); });
        const T along = dot * s * s / n;
        write_row(pdx + r * cols, cols, mode_x,
                  [=](int64_t c) { return s * (grad[c] * weight[c] - sum - (in[c] - m) * along); });
      });
    }
    if (dw.defined())
      column_sum(dw.data<T>(), rows, cols, mode_w, [&](int64_t begin, int64_t end, T* partial) {
        for (int64_t r = begin; r < end; ++r) {
          const T *in = px + r * cols, *grad = pdy + r * cols;
          const T m = pmean[r], s = prstd[r];
          COHORT_VECTORIZE
          for (int64_t c = 0; c < cols; ++c) partial[c] += grad[c] * ((in[c] - m) * s);
        }
      });
    if (db.defined())
      column_sum(db.data<T>(), rows, cols, mode_b, [&](int64_t begin, int64_t end, T* partial) {
        for (int64_t r = begin; r < end; ++r) {
          const T* grad = pdy + r * cols;
          COHORT_VECTORIZE
          for (int64_t c = 0; c < cols; ++c) partial[c] += grad[c];
        }
      });
  });
}

COHORT_DECLARE_CUDA(add_rms_norm_forward)
void add_rms_norm_forward(Tensor& sum, Tensor& y, Tensor& rstd, const Tensor& a, const Tensor& b,
                          const Tensor& w, double eps) {
  constexpr const char* kOp = "add_rms_norm";
  check_sum(sum, a, b, kOp);
  check_forward(y, rstd, a, w, kOp);
  COHORT_FORWARD_TO_CUDA(a, add_rms_norm_forward(sum, y, rstd, a, b, w, eps));
  add_forward(sum, a, b);
  rms_norm_forward(y, rstd, sum, w, eps);
}

COHORT_DECLARE_CUDA(add_layer_norm_forward)
void add_layer_norm_forward(Tensor& sum, Tensor& y, Tensor& mean, Tensor& rstd, const Tensor& a,
                            const Tensor& b, const Tensor& w, const Tensor& bias, double eps) {
  constexpr const char* kOp = "add_layer_norm";
  check_sum(sum, a, b, kOp);
  check_forward(y, rstd, a, w, kOp);
  check_mean_and_bias(mean, a, bias, kOp);
  COHORT_FORWARD_TO_CUDA(a, add_layer_norm_forward(sum, y, mean, rstd, a, b, w, bias, eps));
  add_forward(sum, a, b);
  layer_norm_forward(y, mean, rstd, sum, w, bias, eps);
}

COHORT_DECLARE_CUDA(softmax_forward)
void softmax_forward(Tensor& y, const Tensor& x) {
  constexpr const char* kOp = "softmax";
  check_tensor(x, x.shape(), x.dtype(), kOp, "x", x.device());
  check_tensor(y, x.shape(), x.dtype(), kOp, "y", x.device());
  COHORT_FORWARD_TO_CUDA(x, softmax_forward(y, x));
  dispatch_float(x.dtype(), kOp, [&]<class T>() {
    const int64_t rows = x.rows(), cols = x.cols();
    const T* px = x.data<T>();
    T* py = y.data<T>();
    for_rows(rows, cols, [&](int64_t r) {
      const T* in = px + r * cols;
      T* out = py + r * cols;
      const T largest = lane_max(in, cols);
      write_row(out, cols, Grad::kOverwrite, [=](int64_t c) { return vexp(in[c] - largest); });
      const T sum = lane_sum<T>(cols, [&](int64_t c) { return out[c]; });
      write_row(out, cols, Grad::kOverwrite, [=](int64_t c) { return out[c] / sum; });
    });
  });
}

COHORT_DECLARE_CUDA(softmax_backward)
void softmax_backward(Tensor& dx, const Tensor& dy, const Tensor& y, Grad mode) {
  constexpr const char* kOp = "softmax_backward";
  check_tensor(y, y.shape(), y.dtype(), kOp, "y", y.device());
  check_tensor(dy, y.shape(), y.dtype(), kOp, "dy", y.device());
  check_tensor(dx, y.shape(), y.dtype(), kOp, "dx", y.device());
  COHORT_FORWARD_TO_CUDA(y, softmax_backward(dx, dy, y, mode));
  dispatch_float(y.dtype(), kOp, [&]<class T>() {
    const int64_t rows = y.rows(), cols = y.cols();
    const T *py = y.data<T>(), *pdy = dy.data<T>();
    T* pdx = dx.data<T>();
    for_rows(rows, cols, [&](int64_t r) {
      const T *prob = py + r * cols, *grad = pdy + r * cols;
      const T dot = lane_sum<T>(cols, [&](int64_t c) { return grad[c] * prob[c]; });
      write_row(pdx + r * cols, cols, mode, [=](int64_t c) { return prob[c] * (grad[c] - dot); });
    });
  });
}

}  // namespace cohort::kernels
