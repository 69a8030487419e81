// Row normalisations and softmax over the last dimension. Statistics and weight gradients are
// accumulate_dtype() of x; what is stored in x's dtype is rounded once.
#pragma once

#include "kernels/common.h"

namespace cohort::kernels {

// y[r, :] = x[r, :] rstd[r] w,  rstd[r] = 1 / sqrt(mean(x[r, :]^2) + eps)
// (Zhang and Sennrich 2019)
//   x, y: [..., C]   w: [C]   rstd: [rows], kept for the backward
void rms_norm_forward(Tensor& y, Tensor& rstd, const Tensor& x, const Tensor& w, double eps);
// dx per mode_x; dw[C] per mode_w, summed over rows in an order that follows from the shape and, on
// CUDA, the element size alone. Undefined dx or dw is skipped.
void rms_norm_backward(Tensor& dx, Grad mode_x, Tensor& dw, Grad mode_w, const Tensor& dy,
                       const Tensor& x, const Tensor& w, const Tensor& rstd);

// y[r, :] = (x[r, :] - mean[r]) rstd[r] w + b   (Ba et al. 2016)
//   w, b: [C], b may be undefined   mean, rstd: [rows]
void layer_norm_forward(Tensor& y, Tensor& mean, Tensor& rstd, const Tensor& x, const Tensor& w,
                        const Tensor& b, double eps);
void layer_norm_backward(Tensor& dx, Grad mode_x, Tensor& dw, Grad mode_w, Tensor& db, Grad mode_b,
                         const Tensor& dy, const Tensor& x, const Tensor& w, const Tensor& mean,
                         const Tensor& rstd);

// A residual step and the norm after it in one pass: sum = a + b, rounded to the dtype, and the
// norm of `sum`. The bits are those of add_forward() followed by the norm. `sum` may be a or b.
void add_rms_norm_forward(Tensor& sum, Tensor& y, Tensor& rstd, const Tensor& a, const Tensor& b,
                          const Tensor& w, double eps);
void add_layer_norm_forward(Tensor& sum, Tensor& y, Tensor& mean, Tensor& rstd, const Tensor& a,
                            const Tensor& b, const Tensor& w, const Tensor& bias, double eps);

// y[r, :] = exp(x[r, :] - max) / sum
void softmax_forward(Tensor& y, const Tensor& x);
// dx (+)= y (dy - sum(dy y))
void softmax_backward(Tensor& dx, const Tensor& dy, const Tensor& y, Grad mode);

}  // namespace cohort::kernels
