#include "kernels/matmul.h"

#include "tests/kernels/kernel_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

Tensor naive(const Tensor& a, const Tensor& b, Transpose ta, Transpose tb) {
  const bool flip_a = ta == Transpose::kYes, flip_b = tb == Transpose::kYes;
  const int64_t m = a.dim(flip_a), k = a.dim(!flip_a), n = b.dim(!flip_b);
  const auto x = a.to_vector<double>(), y = b.to_vector<double>();
  std::vector<double> c(static_cast<size_t>(m * n));
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t l = 0; l < k; ++l)
        sum += x[static_cast<size_t>(flip_a ? l * m + i : i * k + l)] *
               y[static_cast<size_t>(flip_b ? j * k + l : l * n + j)];
      c[static_cast<size_t>(i * n + j)] = sum;
    }
  return Tensor::from(c, {m, n});
}

Tensor operand(int64_t rows, int64_t cols, Transpose t, DType dtype, uint64_t seed) {
  return random_tensor(t == Transpose::kYes ? Shape{cols, rows} : Shape{rows, cols}, dtype, seed);
}

constexpr Transpose kBoth[] = {Transpose::kNo, Transpose::kYes};

TEST(Matmul, EqualsTheNaiveMatmulForAllTransposesAndTails) {
  const int64_t sizes[][3] = {{1, 1, 1},   {1, 5, 3},    {3, 1, 2},     {2, 3, 1},    {17, 65, 33},
                              {65, 7, 98}, {129, 64, 2}, {300, 20, 97}, {5, 300, 130}};
  for (const auto& [m, k, n] : sizes)
    for (const Transpose ta : kBoth)
      for (const Transpose tb : kBoth)
        for (const DType dtype : {DType::kF64, DType::kF32}) {
          const Tensor a = operand(m, k, ta, dtype, 1), b = operand(k, n, tb, dtype, 2);
          const Tensor expected = naive(a, b, ta, tb);
          Tensor c = Tensor::full({m, n}, NAN, dtype);
          matmul({c, a, b, {.a = ta, .b = tb}});
          // The naive sum itself is off by about sqrt(k) roundings.
          const double tolerance = dtype == DType::kF64 ? 1e-14 : kF32Tolerance;
          EXPECT_LE(relative_error(c, expected), tolerance) << m << " " << k << " " << n;
          Tensor d = Tensor::full({m, n}, 1, dtype);
          matmul({d, a, b, {.a = ta, .b = tb, .out = Grad::kAccumulate}});
          Tensor expected_sum = expected.clone();
          for (int64_t i = 0; i < m * n; ++i) expected_sum.data<double>()[i] += 1;
          EXPECT_LE(relative_error(d, expected_sum), tolerance) << m << " " << k << " " << n;
        }
}

TEST(Matmul, GradientsAreTransposedMatmuls) {
  Tensor x = random_tensor({7, 5}, DType::kF64, 1), w = random_tensor({3, 5}, DType::kF64, 2);
  Tensor bias = random_tensor({3}, DType::kF64, 3), y = Tensor::empty({7, 3}, DType::kF64);
  const Tensor dy = random_tensor({7, 3}, DType::kF64, 4);
  const auto loss = [&] {
    linear_forward({y, x, w, bias});
    return dot(y, dy);
  };
  Tensor dx = Tensor::empty({7, 5}, DType::kF64), dw = Tensor::empty({3, 5}, DType::kF64);
  Tensor dbias = Tensor::empty({3}, DType::kF64);
  matmul({dx, dy, w});
  matmul({dw, dy, x, {.a = Transpose::kYes}});
  bias_backward({{dbias}, dy});
  expect_gradient(x, dx, loss, "dx");
  expect_gradient(w, dw, loss, "dw");
  expect_gradient(bias, dbias, loss, "dbias");
}

// The guarantee that exact sampling relies on. M = 512 is the reference; other M have other
// tilings, padding and thread counts.
void expect_row_independence(int64_t k, int64_t n, DType dtype, Transpose tb) {
  constexpr int64_t kRows = 512;
  static const Tensor pool = random_tensor({kRows * 4096}, DType::kF64, 1);
  static const Tensor pool_f32 = pool.to(DType::kF32);
  const auto random = [&](int64_t first, const Shape& shape) {
    const Tensor& from = dtype == DType::kF64 ? pool : pool_f32;
    return from.narrow(0, first, shape.numel()).reshape(shape);
  };
  const Tensor a = random(0, {kRows, k}), start = random(11, {kRows, n});
  const Tensor b = random(7, tb == Transpose::kYes ? Shape{n, k} : Shape{k, n});
  Tensor all = start.clone();
  matmul({all, a, b, {.b = tb, .out = Grad::kAccumulate}});
  const int64_t rows[] = {1, 2, 3, 5, 15, 16, 17, 31, 33, 64, 100, 129, 257};
  for (size_t i = 0; i < std::size(rows); ++i) {
    const int64_t m = rows[i], first = (kRows - m) / 3;
    const Threads guard(1 + static_cast<int>(i % 3));
    Tensor c = start.narrow(0, first, m).clone();
    matmul({c, a.narrow(0, first, m), b, {.b = tb, .out = Grad::kAccumulate}});
    EXPECT_TRUE(bit_equal(c, all.narrow(0, first, m)))
        << "m " << m << " k " << k << " n " << n << " " << dtype_name(dtype) << " transposed "
        << (tb == Transpose::kYes);
  }
}

TEST(Matmul, RowsDoNotDependOnTheOtherRows) {
  for (const int64_t k : {1, 3, 17, 65, 384})
    for (const int64_t n : {1, 2, 17, 97, 193})
      for (const DType dtype : {DType::kF32, DType::kF64})
        for (const Transpose tb : kBoth) expect_row_independence(k, n, dtype, tb);
  expect_row_independence(4096, 97, DType::kF32, Transpose::kYes);
}

TEST(MatmulSlow, RowsDoNotDependOnTheOtherRows) {
  for (const int64_t k : {1, 2, 3, 7, 17, 64, 65, 384, 1000, 4096})
    for (const int64_t n : {1, 2, 3, 7, 17, 64, 65, 96, 97, 98, 193, 384, 500})
      for (const DType dtype : {DType::kF32, DType::kF64})
        for (const Transpose tb : kBoth) expect_row_independence(k, n, dtype, tb);
}

TEST(Matmul, ThreadCountDoesNotChangeBits) {
  for (const auto& [m, k, n] : {std::tuple{130, 384, 200}, {700, 65, 97}, {40, 64, 400}}) {
    const Tensor x = random_tensor({m, k}, DType::kF32, 1),
                 w = random_tensor({n, k}, DType::kF32, 2);
    const Tensor bias = random_tensor({n}, DType::kF32, 3),
                 dy = random_tensor({m, n}, DType::kF32, 4);
    expect_thread_invariant([&] {
      Tensor y = Tensor::empty({m, n}, DType::kF32), dx = Tensor::empty({m, k}, DType::kF32);
      Tensor dw = Tensor::empty({n, k}, DType::kF32), dbias = Tensor::empty({n}, DType::kF32);
      linear_forward({y, x, w, bias});
      matmul({dx, dy, w});
      matmul({dw, dy, x, {.a = Transpose::kYes}});
      bias_backward({{dbias}, dy});
      return std::vector{y, dx, dw, dbias};
    });
  }
}

// Columns of a matrix whose other columns are NaN.
Tensor columns_of_wider(const Tensor& t) {
  Tensor wide = Tensor::full({t.dim(0), t.dim(1) + 7}, NAN, t.dtype());
  return wide.narrow(1, 3, t.dim(1)).copy_(t);
}

TEST(Matmul, StridedOperandsHaveTheBitsOfContiguousOnes) {
  const int64_t sizes[][3] = {{1, 1, 1}, {5, 33, 1}, {17, 65, 33}, {64, 40, 72}, {5, 300, 130}};
  for (const auto& [m, k, n] : sizes)
    for (const Transpose ta : kBoth)
      for (const Transpose tb : kBoth)
        for (const DType dtype : {DType::kF64, DType::kF32})
          for (const Grad out : {Grad::kOverwrite, Grad::kAccumulate}) {
            const Tensor a = operand(m, k, ta, dtype, 1), b = operand(k, n, tb, dtype, 2);
            const MatmulDesc desc{.a = ta, .b = tb, .out = out};
            Tensor expected = random_tensor({m, n}, dtype, 3), c = expected.clone();
            matmul({expected, a, b, desc});
            matmul({c, columns_of_wider(a), columns_of_wider(b), desc});
            EXPECT_TRUE(bit_equal(c, expected)) << m << " " << k << " " << n;
          }
}

// A power of two changes exponents only.
TEST(Matmul, ScaleMultipliesTheProduct) {
  for (const Transpose ta : kBoth)
    for (const int64_t n : {1, 33}) {
      const Tensor a = operand(20, 65, ta, DType::kF64, 1);
      const Tensor b = operand(65, n, Transpose::kNo, DType::kF64, 2);
      Tensor whole = Tensor::empty({20, n}, DType::kF64), c = Tensor::full({20, n}, 3, DType::kF64);
      matmul({whole, a, b, {.a = ta}});
      matmul({c, a, b, {.a = ta, .out = Grad::kAccumulate, .scale = 0.25}});
      for (int64_t i = 0; i < c.numel(); ++i)
        EXPECT_NEAR(c.data<double>()[i], 3 + whole.data<double>()[i] / 4, 1e-13);
      matmul({c, a, b, {.a = ta, .scale = 0.25}});
      for (int64_t i = 0; i < c.numel(); ++i)
        EXPECT_EQ(c.data<double>()[i], whole.data<double>()[i] / 4);
    }
}

// x and w with `tail` more columns.
Tensor with_tail(const Tensor& t, const Tensor& tail) {
  Tensor out = Tensor::empty({t.dim(0), t.dim(1) + tail.dim(1)}, t.dtype());
  out.narrow(1, 0, t.dim(1)).copy_(t);
  out.narrow(1, t.dim(1), tail.dim(1)).copy_(tail);
  return out;
}

TEST(Matmul, ATailOfZerosChangesNoBit) {
  constexpr int64_t kRows = 70, kTail = 64;
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{1, 5}, {33, 17}, {96, 384}, {7, 1000}})
    for (const DType dtype : {DType::kF32, DType::kF64})
      for (const bool zero_x : {false, true}) {
        const Tensor x = random_tensor({kRows, k}, dtype, 1), w = random_tensor({n, k}, dtype, 2);
        const Tensor bias = random_tensor({n}, dtype, 3);
        const auto tail_of = [&](int64_t rows, bool zero) {
          return zero ? Tensor::zeros({rows, kTail}, dtype)
                      : random_tensor({rows, kTail}, dtype, 4);
        };
        const Tensor wide_x = with_tail(x, tail_of(kRows, zero_x));
        const Tensor wide_w = with_tail(w, tail_of(n, !zero_x));
        for (int64_t rows = 1; rows <= kRows; ++rows) {
          Tensor expected = Tensor::empty({rows, n}, dtype), y = expected.clone();
          linear_forward({expected, x.narrow(0, 0, rows), w, bias});
          linear_forward({y, wide_x.narrow(0, 0, rows), wide_w, bias, kTail});
          ASSERT_TRUE(bit_equal(y, expected)) << rows << " rows, " << n << " x " << k;
        }
      }
}

TEST(Matmul, ATailIsAddedToTheSum) {
  const Tensor x = random_tensor({37, 50}, DType::kF64, 1),
               w = random_tensor({30, 50}, DType::kF64, 2);
  const Tensor h = random_tensor({37, 64}, DType::kF64, 3),
               b = random_tensor({30, 64}, DType::kF64, 4);
  const Tensor bias = random_tensor({30}, DType::kF64, 5);
  Tensor expected = Tensor::empty({37, 30}, DType::kF64), y = expected.clone();
  linear_forward({expected, x, w, bias});
  matmul({expected, h, b, {.b = Transpose::kYes, .out = Grad::kAccumulate}});
  linear_forward({y, with_tail(x, h), with_tail(w, b), bias, 64});
  EXPECT_LE(relative_error(y, expected), 1e-12);
  linear_forward({expected, with_tail(x, h), with_tail(w, b), bias, 114});  // nothing else
  EXPECT_LE(relative_error(y, expected), 1e-12);
  EXPECT_THROW_WITH(linear_forward({y, x, w, bias, 51}), Error, "a tail of at most 50 columns");
}

TEST(Matmul, HigherRankInputsAreRowsOfTheLastDimension) {
  const Tensor x = random_tensor({2, 3, 4}, DType::kF64, 1),
               w = random_tensor({5, 4}, DType::kF64, 2);
  Tensor y = Tensor::empty({2, 3, 5}, DType::kF64), flat = Tensor::empty({6, 5}, DType::kF64);
  linear_forward({y, x, w, none()});
  matmul({flat, x.reshape({6, 4}), w, {.b = Transpose::kYes}});
  EXPECT_TRUE(bit_equal(y.reshape({6, 5}), flat));
}

TEST(Matmul, NoRowsMeansNoWork) {
  const Tensor x = Tensor::empty({0, 4}, DType::kF32), w = random_tensor({5, 4}, DType::kF32, 1);
  Tensor y = Tensor::empty({0, 5}, DType::kF32), dw = Tensor::full({5, 4}, 7, DType::kF32);
  linear_forward({y, x, w, none()});
  matmul({dw, y, x, {.a = Transpose::kYes, .out = Grad::kAccumulate}});
  EXPECT_TRUE(bit_equal(dw, Tensor::full({5, 4}, 7, DType::kF32)));
  matmul({dw, y, x, {.a = Transpose::kYes}});
  EXPECT_TRUE(bit_equal(dw, Tensor::zeros({5, 4}, DType::kF32)));
}

TEST(Matmul, BiasBackwardOverwritesOrAccumulates) {
  const Tensor dy = Tensor::from<double>({1, 2, 3, 4, 5, 6}, {3, 2});
  Tensor dbias = Tensor::from<double>({10, 20}, {2});
  bias_backward({{dbias, Grad::kAccumulate}, dy});
  EXPECT_EQ(dbias.to_vector<double>(), (std::vector<double>{19, 32}));
  bias_backward({{dbias}, dy});
  EXPECT_EQ(dbias.to_vector<double>(), (std::vector<double>{9, 12}));
}

TEST(Matmul, MismatchesNameTheSizes) {
  const Tensor a = Tensor::zeros({2, 3}, DType::kF32), b = Tensor::zeros({4, 5}, DType::kF32);
  Tensor c = Tensor::zeros({2, 5}, DType::kF32);
  EXPECT_THROW_WITH(matmul({c, a, b}), Error, "expected b f32[3, 5] = (K, N), where K = 3 as in a");
  Tensor d = Tensor::zeros({2, 4}, DType::kF32);
  EXPECT_THROW_WITH(matmul({d, a, Tensor::zeros({3, 5}, DType::kF32)}), Error,
                    "expected c f32[2, 5] = (M, N)");
  EXPECT_THROW_WITH(matmul({c, a, Tensor::zeros({3, 5}, DType::kF64)}), Error,
                    "expected b f32[3, 5]");
  EXPECT_THROW_WITH(matmul({c, Tensor::zeros({3, 2}, DType::kF32).transpose(0, 1),
                            Tensor::zeros({3, 5}, DType::kF32)}),
                    Error, "contiguous a");
  EXPECT_THROW_WITH(matmul({c, a.to(DType::kBF16), b}), Error, "expected b bf16[3, 5]");
  EXPECT_THROW_WITH(
      linear_forward({c, a, Tensor::zeros({5, 3}, DType::kF32), Tensor::zeros({4}, DType::kF32)}),
      Error, "expected bias f32[5]");
}

}  // namespace
}  // namespace cohort::kernels
