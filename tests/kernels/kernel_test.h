// Helpers of the kernel tests: gradient checks by central differences, comparison against f64.
#pragma once

#include <cmath>
#include <concepts>
#include <functional>
#include <vector>

#include "kernels/common.h"
#include "tests/support/test_util.h"

namespace cohort::kernels::test {

using cohort::test::bit_equal;
using cohort::test::random_tensor;
using cohort::test::relative_error;
using cohort::test::Threads;

// An undefined tensor as an lvalue: a gradient to skip.
inline Tensor& none() {
  static thread_local Tensor undefined;
  undefined = Tensor();
  return undefined;
}

// A copy whose dimension `dim` has padding of value `padding` up to `size`.
inline Tensor padded(const Tensor& values, int dim, int64_t size, double padding) {
  Shape shape = values.shape();
  shape[dim] = size;
  const Tensor all = Tensor::full(shape, padding, values.dtype(), values.device());
  return all.hide_padding(dim, values.dim(dim)).copy_(values);
}

// True if every element of the padding that hide_padding(dim, .) has hidden equals `padding`.
inline bool padding_is(const Tensor& t, int dim, double padding) {
  const Tensor all = t.with_padding();
  for (const double x : all.narrow(dim, t.dim(dim), all.dim(dim) - t.dim(dim)).to_vector<double>())
    if (!(x == padding || (std::isnan(x) && std::isnan(padding)))) return false;
  return true;
}

inline Tensor ids(const std::vector<int32_t>& values) {
  return Tensor::from(values);
}

// [1, ...]: a row of `t` along dimension 0.
inline Tensor one_row(const Tensor& t, std::integral auto row) {
  return t.narrow(0, static_cast<int64_t>(row), 1).contiguous();
}
// Rows of `t`, a CPU tensor, along dimension 0, with rows of `other` for those below 0.
inline Tensor gather_rows(const Tensor& t, const std::vector<int64_t>& rows, double other = 0) {
  Shape shape = t.shape();
  shape[0] = std::ssize(rows);
  Tensor out = Tensor::full(shape, other, t.dtype());
  for (int64_t i = 0; i < shape[0]; ++i)
    if (const int64_t row = rows[static_cast<size_t>(i)]; row >= 0)
      out.narrow(0, i, 1).copy_(t.narrow(0, row, 1));
  return out;
}

// sum(a b) over all elements in f64: turns a tensor output into a scalar loss.
inline double dot(const Tensor& a, const Tensor& b) {
  const auto x = a.to_vector<double>(), y = b.to_vector<double>();
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
  return sum;
}

// Expects `analytic` to be the gradient of loss() with respect to the f64 tensor x. The numeric
// gradient is the fourth-order central difference: with step h its truncation error is of order
// h^4 = 1e-12 and its rounding error 1e-16 |loss| / h = 1e-13 |loss|, both below the tolerance.
inline void expect_gradient(Tensor x, const Tensor& analytic, const std::function<double()>& loss,
                            const char* name) {
  ASSERT_EQ(x.dtype(), DType::kF64);
  ASSERT_EQ(x.shape(), analytic.shape());
  const auto gradient = analytic.to_vector<double>();
  double* value = x.data<double>();
  std::vector<double> numeric(gradient.size());
  double largest = 0;
  for (size_t i = 0; i < gradient.size(); ++i) {
    const double at = value[i], h = 1e-3;
    const auto shifted = [&](double by) {
      value[i] = at + by;
      return loss();
    };
    numeric[i] = (8 * (shifted(h) - shifted(-h)) - (shifted(2 * h) - shifted(-2 * h))) / (12 * h);
    value[i] = at;
    largest = std::max(largest, std::fabs(gradient[i]));
  }
  for (size_t i = 0; i < gradient.size(); ++i) {
    const double tolerance =
        1e-6 * std::max(std::fabs(gradient[i]), std::fabs(numeric[i])) + 1e-9 * largest;
    EXPECT_LE(std::fabs(gradient[i] - numeric[i]), tolerance)
        << name << "[" << i << "]: " << gradient[i] << " against " << numeric[i];
  }
}

// Runs fn with 1, 2 and 3 threads and expects the same bits. fn returns its outputs.
inline void expect_thread_invariant(const std::function<std::vector<Tensor>()>& fn) {
  std::vector<Tensor> expected;
  for (const int threads : {1, 2, 3}) {
    const Threads guard(threads);
    const std::vector<Tensor> got = fn();
    if (expected.empty()) expected = got;
    for (size_t i = 0; i < got.size(); ++i)
      EXPECT_TRUE(bit_equal(got[i], expected[i])) << "output " << i << ", threads " << threads;
  }
}

// f32 against f64 on the same (f32-representable) inputs: norm-wise 1e-5, a hundred units of
// rounding, which holds for the sums of some thousand terms used here.
inline constexpr double kF32Tolerance = 1e-5;

// Gains of a wide rotary table.
inline double rope_gain(int64_t position, int64_t channel) {
  return 0.5 + 0.01 * static_cast<double>(position) + 0.02 * static_cast<double>(channel);
}

}  // namespace cohort::kernels::test
