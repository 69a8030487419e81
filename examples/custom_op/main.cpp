// A custom differentiable op outside Cohort's source tree: soft_cap(x) = cap tanh(x / cap), which
// keeps attention scores and logits within (-cap, cap). An op is a forward and one call of
// make_node() with its backward; gradcheck() checks the backward, alone and between other ops.
#include <cmath>
#include <cstdio>
#include <exception>
#include <string>

#include "autograd/gradcheck.h"
#include "autograd/ops.h"
#include "core/parallel.h"
#include "core/rng.h"

namespace {

using cohort::Gradients;
using cohort::Tensor;
using cohort::Variable;
using cohort::kernels::Grad;

constexpr int64_t kGrain = 4096;  // elements per block of work

Variable soft_cap(const Variable& x, double cap) {
  const Tensor in = x.value().contiguous();
  Tensor y = Tensor::empty_like(in);
  cohort::dispatch_float(in.dtype(), "soft_cap", [&]<class T>() {
    const T* from = in.data<T>();
    T *to = y.data<T>(), c = static_cast<T>(cap);
    cohort::parallel_for(y.numel(), kGrain, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) to[i] = c * std::tanh(from[i] / c);
    });
  });
  // The derivative is 1 - tanh(x / cap)^2 = 1 - (y / cap)^2, so the backward keeps y instead of x.
  return cohort::make_node("soft_cap", y, {x}, [y, cap](const Tensor& dy, Gradients& gradients) {
    cohort::GradSlot dx = gradients.slot(0);
    cohort::dispatch_float(y.dtype(), "soft_cap", [&]<class T>() {
      const T *out = y.data<T>(), *from = dy.data<T>(), c = static_cast<T>(cap);
      T* to = dx.tensor.data<T>();
      // If x has other uses, this contribution is added to theirs.
      const T keep = dx.mode == Grad::kAccumulate ? T(1) : T(0);
      cohort::parallel_for(y.numel(), kGrain, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const T ratio = out[i] / c, gradient = from[i] * (1 - ratio * ratio);
          to[i] = keep != 0 ? to[i] + gradient : gradient;
        }
      });
    });
  });
}

Tensor random_matrix(int64_t rows, int64_t columns, uint64_t seed) {
  cohort::Rng rng(seed, cohort::rng_stream(6));
  Tensor t = Tensor::empty({rows, columns}, cohort::DType::kF64);
  for (int64_t i = 0; i < t.numel(); ++i) t.data<double>()[i] = rng.normal();
  return t;
}

bool report(const char* name, const cohort::GradcheckResult& result) {
  std::printf("%-34s %3lld checks, worst error %.2g of the tolerance: %s\n", name,
              static_cast<long long>(result.checks), result.worst,
              result.ok ? "ok" : result.message.c_str());
  return result.ok;
}

}  // namespace

int main() {
  try {
    const Tensor q = random_matrix(3, 5, 1), k = random_matrix(4, 5, 2);
    const bool alone =
        report("soft_cap(x)", cohort::gradcheck([](auto in) { return soft_cap(in[0], 1.5); }, {q}));
    // x has two uses here, so one of the two contributions to its gradient accumulates.
    const bool twice =
        report("x * soft_cap(x)",
               cohort::gradcheck([](auto in) { return mul(in[0], soft_cap(in[0], 1.5)); }, {q}));
    const bool between =
        report("sigmoid(soft_cap(q k^T))",
               cohort::gradcheck(
                   [](auto in) { return sigmoid(soft_cap(linear(in[0], in[1]), 1.5)); }, {q, k}));
    return alone && twice && between ? 0 : 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "custom_op: %s\n", e.what());
    return 1;
  }
}
