// Elementwise loops over the formulas of elementwise.h. The loops are marked as independent, so
// that they are vectorised where input and output are the same tensor, too.
#include <vector>

#include "core/parallel.h"
#include "kernels/cuda_dispatch.h"
#include "kernels/elementwise.h"
#include "kernels/reduce.h"

namespace cohort::kernels {
namespace {

// out[i] (+)= value(i) for i in [begin, end).
template <class T, class F>
void write_range(T* out, int64_t begin, int64_t end, Grad mode, F&& value) {
  if (mode == Grad::kOverwrite) {
    COHORT_VECTORIZE
    for (int64_t i = begin; i < end; ++i) out[i] = value(i);
  } else {
    COHORT_VECTORIZE
    for (int64_t i = begin; i < end; ++i) out[i] += value(i);
  }
}
template <class T, class F>
void write(T* out, int64_t n, Grad mode, F&& value) {
  parallel_for(n, kElementGrain,
               [&](int64_t begin, int64_t end) { write_range(out, begin, end, mode, value); });
}

void check_unary(const Tensor& y, const Tensor& x, const char* op) {
  check_tensor(x, x.shape(), x.dtype(), op, "x", x.device());
  check_tensor(y, x.shape(), x.dtype(), op, "y", x.device());
}
void check_unary_backward(const Tensor& dx, const Tensor& dy, const Tensor& x, const Tensor& y,
                          const char* op) {
  check_unary(y, x, op);
  check_tensor(dy, x.shape(), x.dtype(), op, "dy", x.device());
  check_tensor(dx, x.shape(), x.dtype(), op, "dx", x.device());
}
void check_operands(const Tensor& a, const Tensor& b, const char* op) {
  check_tensor(a, a.shape(), a.dtype(), op, "a", a.device());
  check_tensor(b, a.shape(), a.dtype(), op, "b", a.device());
}
void check_binary_backward(const Tensor& da, const Tensor& db, const Tensor& dy, const Tensor& a,
                           const Tensor& b, const char* op) {
  check_operands(a, b, op);
  check_tensor(dy, a.shape(), a.dtype(), op, "dy", a.device());
  if (da.defined()) check_tensor(da, a.shape(), a.dtype(), op, "da", a.device());
  if (db.defined()) check_tensor(db, a.shape(), a.dtype(), op, "db", a.device());
}
void check_scalar(const Tensor& value, const Tensor& x, const char* op, const char* name) {
  COHORT_CHECK(value.numel() == 1, "[", op, "] expected ", name, " of one element, got ",
               value.str());
  check_tensor(value, value.shape(), accumulate_dtype(x.dtype()), op, name, x.device());
}
// On CUDA y may have another float dtype than x.
void check_scale(const Tensor& y, const Tensor& x, const char* op) {
  check_tensor(x, x.shape(), x.dtype(), op, "x", x.device());
  const bool mixed = x.device().is_cuda() && is_float(y.dtype());
  check_tensor(y, x.shape(), mixed ? y.dtype() : x.dtype(), op, "y", x.device());
}

template <class Op>
void unary_forward(Tensor& y, const Tensor& x, const char* op) {
  dispatch_float(x.dtype(), op, [&]<class T>() {
    const T* in = x.data<T>();
    write(y.data<T>(), x.numel(), Grad::kOverwrite, [=](int64_t i) { return Op::forward(in[i]); });
  });
}

template <class Op>
void unary_backward(Tensor& dx, const Tensor& dy, const Tensor& x, const Tensor& y, Grad mode,
                    const char* op) {
  dispatch_float(x.dtype(), op, [&]<class T>() {
    const T *in = x.data<T>(), *out = y.data<T>(), *grad = dy.data<T>();
    write(dx.data<T>(), x.numel(), mode,
          [=](int64_t i) { return grad[i] * Op::derivative(in[i], out[i]); });
  });
}

template <class Op>
void binary_forward(Tensor& y, const Tensor& a, const Tensor& b, const char* op) {
  dispatch_float(a.dtype(), op, [&]<class T>() {
    const T *left = a.data<T>(), *right = b.data<T>();
    write(y.data<T>(), a.numel(), Grad::kOverwrite,
          [=](int64_t i) { return Op::forward(left[i], right[i]); });
  });
}

template <class Op>
void binary_backward(Tensor& da, Grad mode_a, Tensor& db, Grad mode_b, const Tensor& dy,
                     const Tensor& a, const Tensor& b, const char* op) {
  dispatch_float(a.dtype(), op, [&]<class T>() {
    const T *left = a.data<T>(), *right = b.data<T>(), *grad = dy.data<T>();
    T* out_a = da.defined() ? da.data<T>() : nullptr;
    T* out_b = db.defined() ? db.data<T>() : nullptr;
    // One block after the other for both outputs: the second finds its inputs in the cache.
    parallel_for(a.numel(), kElementGrain, [&](int64_t begin, int64_t end) {
      if (out_a != nullptr)
        write_range(out_a, begin, end, mode_a,
                    [=](int64_t i) { return grad[i] * Op::da(left[i], right[i]); });
      if (out_b != nullptr)
        write_range(out_b, begin, end, mode_b,
                    [=](int64_t i) { return grad[i] * Op::db(left[i], right[i]); });
    });
  });
}

// y (+)= factor x on the CPU.
template <class T>
void scale_values(Tensor& y, const Tensor& x, T factor, Grad mode) {
  const T* in = x.data<T>();
  write(y.data<T>(), x.numel(), mode, [=](int64_t i) { return factor * in[i]; });
}

}  // namespace

#define COHORT_DEFINE_UNARY(Op, name)                                                  \
  COHORT_DECLARE_CUDA(name##_forward)                                                  \
  COHORT_DECLARE_CUDA(name##_backward)                                                 \
  void name##_forward(Tensor& y, const Tensor& x) {                                    \
    check_unary(y, x, #name);                                                          \
    COHORT_FORWARD_TO_CUDA(x, name##_forward(y, x));                                   \
    unary_forward<Op>(y, x, #name);                                                    \
  }                                                                                    \
  void name##_backward(Tensor& dx, const Tensor& dy, const Tensor& x, const Tensor& y, \
                       Grad mode) {                                                    \
    check_unary_backward(dx, dy, x, y, #name "_backward");                             \
    COHORT_FORWARD_TO_CUDA(x, name##_backward(dx, dy, x, y, mode));                    \
    unary_backward<Op>(dx, dy, x, y, mode, #name "_backward");                         \
  }
COHORT_UNARY_OPS(COHORT_DEFINE_UNARY)
#undef COHORT_DEFINE_UNARY

#define COHORT_DEFINE_BINARY(Op, name)                                                     \
  COHORT_DECLARE_CUDA(name##_forward)                                                      \
  COHORT_DECLARE_CUDA(name##_backward)                                                     \
  void name##_forward(Tensor& y, const Tensor& a, const Tensor& b) {                       \
    check_operands(a, b, #name);                                                           \
    check_tensor(y, a.shape(), a.dtype(), #name, "y", a.device());                         \
    COHORT_FORWARD_TO_CUDA(a, name##_forward(y, a, b));                                    \
    binary_forward<Op>(y, a, b, #name);                                                    \
  }                                                                                        \
  void name##_backward(Tensor& da, Grad mode_a, Tensor& db, Grad mode_b, const Tensor& dy, \
                       const Tensor& a, const Tensor& b) {                                 \
    check_binary_backward(da, db, dy, a, b, #name "_backward");                            \
    COHORT_FORWARD_TO_CUDA(a, name##_backward(da, mode_a, db, mode_b, dy, a, b));          \
    binary_backward<Op>(da, mode_a, db, mode_b, dy, a, b, #name "_backward");              \
  }
COHORT_BINARY_OPS(COHORT_DEFINE_BINARY)
#undef COHORT_DEFINE_BINARY

COHORT_DECLARE_CUDA(scale)
void scale(Tensor& y, const Tensor& x, double scale, Grad mode) {
  check_scale(y, x, "scale");
  COHORT_FORWARD_TO_CUDA(x, scale(y, x, scale, mode));
  dispatch_float(x.dtype(), "scale",
                 [&]<class T>() { scale_values(y, x, static_cast<T>(scale), mode); });
}

COHORT_DECLARE_CUDA(scale_by)
void scale_by(Tensor& y, const Tensor& x, const Tensor& factor, Grad mode) {
  check_scale(y, x, "scale_by");
  check_scalar(factor, x, "scale_by", "factor");
  COHORT_FORWARD_TO_CUDA(x, scale_by(y, x, factor, mode));
  dispatch_float(x.dtype(), "scale_by",
                 [&]<class T>() { scale_values(y, x, *factor.data<T>(), mode); });
}

COHORT_DECLARE_CUDA(sum)
void sum(Tensor& y, const Tensor& x, Grad mode) {
  COHORT_CHECK(y.numel() == 1 && y.rank() <= 1, "[sum] expected y of one element, got ", y.str());
  check_tensor(x, x.shape(), x.dtype(), "sum", "x", x.device());
  check_scalar(y, x, "sum", "y");
  COHORT_FORWARD_TO_CUDA(x, sum(y, x, mode));
  dispatch_float(x.dtype(), "sum", [&]<class T>() {
    constexpr int64_t kBlock = 4096;
    const T* in = x.data<T>();
    std::vector<T> partial(static_cast<size_t>((x.numel() + kBlock - 1) / kBlock));
    parallel_for(x.numel(), kBlock, [&](int64_t begin, int64_t end) {
      partial[static_cast<size_t>(begin / kBlock)] =
          lane_sum<T>(end - begin, [&](int64_t i) { return in[begin + i]; });
    });
    double total = mode == Grad::kAccumulate ? static_cast<double>(*y.data<T>()) : 0.0;
    for (const T p : partial) total += static_cast<double>(p);
    *y.data<T>() = static_cast<T>(total);
  });
}

COHORT_DECLARE_CUDA(broadcast_scalar)
void broadcast_scalar(Tensor& x, const Tensor& value, Grad mode) {
  check_tensor(x, x.shape(), x.dtype(), "broadcast_scalar", "x", x.device());
  check_scalar(value, x, "broadcast_scalar", "value");
  COHORT_FORWARD_TO_CUDA(x, broadcast_scalar(x, value, mode));
  dispatch_float(x.dtype(), "broadcast_scalar", [&]<class T>() {
    const T v = *value.data<T>();
    write(x.data<T>(), x.numel(), mode, [=](int64_t) { return v; });
  });
}

}  // namespace cohort::kernels
