// Elementwise loops over the formulas of elementwise.h. Iterations are marked as independent, so
// that a loop is also vectorised if input and output are the same tensor.
#include <vector>

#include "core/parallel.h"
#include "kernels/cpu/reduce.h"
#include "kernels/elementwise.h"

namespace cohort::kernels::cpu {
namespace {

// write_range() over [0, n), in parallel.
template <class T, class F>
void write(T* out, int64_t n, Grad mode, F&& value) {
  parallel_for(n, kElementGrain,
               [&](int64_t begin, int64_t end) { write_range(out, begin, end, mode, value); });
}

template <class Op>
void forward(const UnaryForward& args, const char* op) {
  dispatch_float(args.x.dtype(), op, [&]<class T>() {
    const T* in = args.x.data<T>();
    write(args.y.data<T>(), args.x.numel(), Grad::kOverwrite,
          [=](int64_t i) { return Op::forward(in[i]); });
  });
}

template <class Op>
void backward(const UnaryBackward& args, const char* op) {
  dispatch_float(args.x.dtype(), op, [&]<class T>() {
    const T *in = args.x.data<T>(), *out = args.y.data<T>(), *grad = args.dy.data<T>();
    write(args.dx.tensor.data<T>(), args.x.numel(), args.dx.mode,
          [=](int64_t i) { return grad[i] * Op::derivative(in[i], out[i]); });
  });
}

template <class Op>
void forward(const BinaryForward& args, const char* op) {
  dispatch_float(args.a.dtype(), op, [&]<class T>() {
    const T *left = args.a.data<T>(), *right = args.b.data<T>();
    write(args.y.data<T>(), args.a.numel(), Grad::kOverwrite,
          [=](int64_t i) { return Op::forward(left[i], right[i]); });
  });
}

template <class Op>
void backward(const BinaryBackward& args, const char* op) {
  const int64_t n = args.a.numel();
  dispatch_float(args.a.dtype(), op, [&]<class T>() {
    const T *left = args.a.data<T>(), *right = args.b.data<T>(), *grad = args.dy.data<T>();
    T* out_a = args.da.wanted() ? args.da.tensor.data<T>() : nullptr;
    T* out_b = args.db.wanted() ? args.db.tensor.data<T>() : nullptr;
    // Both outputs block by block: the second finds its inputs in the cache.
    parallel_for(n, kElementGrain, [&](int64_t begin, int64_t end) {
      if (out_a != nullptr)
        write_range(out_a, begin, end, args.da.mode,
                    [=](int64_t i) { return grad[i] * Op::da(left[i], right[i]); });
      if (out_b != nullptr)
        write_range(out_b, begin, end, args.db.mode,
                    [=](int64_t i) { return grad[i] * Op::db(left[i], right[i]); });
    });
  });
}

// Outputs have rows of F elements; the inputs, gate | up, and their gradients have rows of 2 F.
template <class Op>
void forward(const GatedForward& args, const char* op) {
  const int64_t half = args.y.cols();
  dispatch_float(args.x.dtype(), op, [&]<class T>() {
    const T* in = args.x.data<T>();
    T* out = args.y.data<T>();
    for_rows(args.y.rows(), half, [&](int64_t r) {
      const T *gate = in + r * 2 * half, *up = gate + half;
      write_range(out + r * half, 0, half, Grad::kOverwrite,
                  [=](int64_t i) { return Op::forward(gate[i], up[i]); });
    });
  });
}

template <class Op>
void backward(const GatedBackward& args, const char* op) {
  const int64_t half = args.dy.cols();
  dispatch_float(args.x.dtype(), op, [&]<class T>() {
    const T *in = args.x.data<T>(), *dy = args.dy.data<T>();
    T* out = args.dx.tensor.data<T>();
    T* values = args.y.defined() ? Tensor(args.y).data<T>() : nullptr;
    for_rows(args.dy.rows(), half, [&](int64_t r) {
      const T *gate = in + r * 2 * half, *up = gate + half, *grad = dy + r * half;
      T *dgate = out + r * 2 * half, *dup = dgate + half;
      write_range(dgate, 0, half, args.dx.mode,
                  [=](int64_t i) { return grad[i] * Op::da(gate[i], up[i]); });
      write_range(dup, 0, half, args.dx.mode,
                  [=](int64_t i) { return grad[i] * Op::db(gate[i], up[i]); });
      if (values != nullptr)  // last: y may be dy
        write_range(values + r * half, 0, half, Grad::kOverwrite,
                    [=](int64_t i) { return Op::forward(gate[i], up[i]); });
    });
  });
}

// y (+)= factor x
template <class T>
void scale_values(Tensor& y, const Tensor& x, T factor, Grad mode) {
  const T* in = x.data<T>();
  write(y.data<T>(), x.numel(), mode, [=](int64_t i) { return factor * in[i]; });
}

}  // namespace

#define COHORT_DEFINE(Op, name)                        \
  void name##_forward(const Op::ForwardArgs& args) {   \
    forward<Op>(args, #name);                          \
  }                                                    \
  void name##_backward(const Op::BackwardArgs& args) { \
    backward<Op>(args, #name "_backward");             \
  }
COHORT_ELEMENTWISE_OPS(COHORT_DEFINE)
#undef COHORT_DEFINE

void scale(const Scale& args) {
  dispatch_float(args.x.dtype(), "scale", [&]<class T>() {
    scale_values(args.y, args.x, static_cast<T>(args.factor), args.mode);
  });
}

void scale_by(const ScaleBy& args) {
  dispatch_float(args.x.dtype(), "scale_by", [&]<class T>() {
    scale_values(args.y, args.x, *args.factor.data<T>(), args.mode);
  });
}

void sum(const Sum& args) {
  dispatch_float(args.x.dtype(), "sum", [&]<class T>() {
    constexpr int64_t kBlock = 4096;
    const int64_t n = args.x.numel();
    const T* in = args.x.data<T>();
    T* out = args.y.data<T>();
    std::vector<T> partial(static_cast<size_t>(ceil_div(n, kBlock)));
    parallel_for(n, kBlock, [&](int64_t begin, int64_t end) {
      partial[static_cast<size_t>(begin / kBlock)] =
          lane_sum<T>(end - begin, [&](int64_t i) { return in[begin + i]; });
    });
    double total = args.mode == Grad::kAccumulate ? static_cast<double>(*out) : 0.0;
    for (const T p : partial) total += static_cast<double>(p);
    *out = static_cast<T>(total);
  });
}

void broadcast_scalar(const BroadcastScalar& args) {
  dispatch_float(args.x.dtype(), "broadcast_scalar", [&]<class T>() {
    const T value = *args.value.data<T>();
    write(args.x.data<T>(), args.x.numel(), args.mode, [=](int64_t) { return value; });
  });
}

}  // namespace cohort::kernels::cpu
