#include "kernels/rope.h"

#include "tests/kernels/kernel_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

constexpr double kTheta = 10000;

// The definition, in f64.
Tensor naive_rope(const Tensor& x, const Tensor& positions, double sign) {
  Tensor y = x.to(DType::kF64).clone();
  const int64_t tokens = x.dim(0), heads = x.dim(1), dim = x.dim(2), half = dim / 2;
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < half; ++i) {
        double* row = y.data<double>() + (t * heads + h) * dim;
        const double angle =
            sign * positions.data<int32_t>()[t] *
            std::pow(kTheta, -2.0 * static_cast<double>(i) / static_cast<double>(dim));
        const double a = row[i], b = row[i + half];
        row[i] = a * std::cos(angle) - b * std::sin(angle);
        row[i + half] = b * std::cos(angle) + a * std::sin(angle);
      }
  return y;
}

TEST(Rope, RotatesByThePosition) {
  for (const Shape& shape : {Shape{0, 2, 4}, Shape{1, 1, 2}, Shape{3, 2, 6}, Shape{3, 5, 66}}) {
    const Tensor x = random_tensor(shape, DType::kF32, 1);
    const Tensor positions = ids(std::vector<int32_t>{0, 7, 99}).narrow(0, 0, shape[0]);
    for (const auto& [direction, sign] :
         {std::pair{RopeDirection::kForward, 1.0}, {RopeDirection::kInverse, -1.0}}) {
      const Tensor expected = naive_rope(x, positions, sign);
      Tensor y = Tensor::empty(shape, DType::kF32), y64 = Tensor::empty(shape, DType::kF64);
      rope({y, x, positions, rope_table(100, rope_frequencies(shape[2], kTheta), 1, DType::kF32),
            direction});
      rope({y64, x.to(DType::kF64), positions,
            rope_table(100, rope_frequencies(shape[2], kTheta), 1, DType::kF64), direction});
      EXPECT_LE(relative_error(y, expected), kF32Tolerance);
      EXPECT_LE(relative_error(y64, expected), 1e-15);
    }
  }
}

TEST(Rope, InverseIsTheBackward) {
  Tensor x = random_tensor({3, 2, 6}, DType::kF64, 1), y = Tensor::empty_like(x);
  const Tensor dy = random_tensor({3, 2, 6}, DType::kF64, 2), positions = ids({5, 0, 41});
  const Tensor table = rope_table(50, rope_frequencies(6, kTheta), 1, DType::kF64);
  Tensor dx = Tensor::empty_like(x);
  rope({dx, dy, positions, table, RopeDirection::kInverse});
  expect_gradient(
      x, dx,
      [&] {
        rope({y, x, positions, table, RopeDirection::kForward});
        return dot(y, dy);
      },
      "dx");
}

TEST(Rope, AccumulatesAndRunsInPlace) {
  const Tensor x = random_tensor({3, 2, 34}, DType::kF64, 1), positions = ids({1, 2, 3});
  const Tensor table = rope_table(4, rope_frequencies(34, kTheta), 1, DType::kF64);
  Tensor y = Tensor::empty_like(x), sum = Tensor::full({3, 2, 34}, 2, DType::kF64);
  Tensor same = x.clone();
  rope({y, x, positions, table, RopeDirection::kForward});
  rope({sum, x, positions, table, RopeDirection::kForward, Grad::kAccumulate});
  rope({same, same, positions, table, RopeDirection::kForward});
  EXPECT_TRUE(bit_equal(same, y));
  for (int64_t i = 0; i < y.numel(); ++i) EXPECT_EQ(sum.data<double>()[i], 2 + y.data<double>()[i]);
}

TEST(Rope, PlainHeadsStayAsTheyAre) {
  const Tensor x = random_tensor({3, 5, 6}, DType::kF32, 1), positions = ids({5, 0, 41});
  const Tensor table = rope_table(50, rope_frequencies(6, kTheta), 1, DType::kF32);
  const Tensor head = x.narrow(1, 0, 3).clone();
  Tensor rotated = Tensor::empty_like(head), y = Tensor::full({3, 5, 6}, NAN, DType::kF32);
  Tensor same = x.clone(), sum = Tensor::full({3, 5, 6}, 1, DType::kF32), none = y.clone();
  rope({rotated, head, positions, table});
  rope({.y = y, .x = x, .positions = positions, .table = table, .plain_heads = 2});
  rope({.y = same, .x = same, .positions = positions, .table = table, .plain_heads = 2});
  rope({.y = sum,
        .x = x,
        .positions = positions,
        .table = table,
        .mode = Grad::kAccumulate,
        .plain_heads = 2});
  rope({.y = none, .x = x, .positions = positions, .table = table, .plain_heads = 5});
  EXPECT_TRUE(bit_equal(y.narrow(1, 0, 3).clone(), rotated));
  EXPECT_TRUE(bit_equal(y.narrow(1, 3, 2).clone(), x.narrow(1, 3, 2).clone()));
  EXPECT_TRUE(bit_equal(same, y));
  EXPECT_TRUE(bit_equal(none, x));
  for (int64_t i = 0; i < y.numel(); ++i) EXPECT_EQ(sum.data<float>()[i], 1 + y.data<float>()[i]);
  EXPECT_THROW_WITH(
      rope({.y = y, .x = x, .positions = positions, .table = table, .plain_heads = 6}), Error,
      "plain_heads from 0 to 5, got 6");
}

TEST(Rope, ANarrowTableRotatesTheFirstElements) {
  const Tensor x = random_tensor({3, 5, 10}, DType::kF32, 1), positions = ids({5, 0, 41}),
               table = rope_table(50, rope_frequencies(4, kTheta), 1, DType::kF32);
  for (const RopeDirection direction : {RopeDirection::kForward, RopeDirection::kInverse}) {
    // Heads of four elements, and the others as they are.
    const Tensor first = x.narrow(2, 0, 4).contiguous();
    Tensor rotated = Tensor::empty_like(first), expected = x.clone();
    rope({.y = rotated,
          .x = first,
          .positions = positions,
          .table = table,
          .direction = direction,
          .plain_heads = 2});
    expected.narrow(2, 0, 4).copy_(rotated);
    Tensor y = Tensor::full({3, 5, 10}, NAN, DType::kF32), same = x.clone(),
           sum = Tensor::full({3, 5, 10}, 1, DType::kF32);
    const auto run = [&](Tensor& to, const Tensor& from, Grad mode) {
      rope({to, from, positions, table, direction, mode, 2});
    };
    run(y, x, Grad::kOverwrite);
    run(same, same, Grad::kOverwrite);
    run(sum, x, Grad::kAccumulate);
    EXPECT_TRUE(bit_equal(y, expected));
    EXPECT_TRUE(bit_equal(same, expected));
    for (int64_t i = 0; i < y.numel(); ++i)
      EXPECT_EQ(sum.data<float>()[i], 1 + expected.data<float>()[i]);
  }
}

TEST(Rope, RowsDependOnTheirPositionOnly) {
  const Tensor x = random_tensor({300, 4, 32}, DType::kF32, 1);
  std::vector<int32_t> values(300);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<int32_t>(i * 7 % 50);
  const Tensor positions = ids(values),
               table = rope_table(50, rope_frequencies(32, kTheta), 1, DType::kF32);
  Tensor all = Tensor::empty_like(x);
  rope({all, x, positions, table, RopeDirection::kForward});
  Tensor one = Tensor::empty({1, 4, 32}, DType::kF32);
  rope({one, x.narrow(0, 137, 1), positions.narrow(0, 137, 1), table, RopeDirection::kForward});
  EXPECT_TRUE(bit_equal(one, all.narrow(0, 137, 1)));
  expect_thread_invariant([&] {
    Tensor y = Tensor::empty_like(x);
    rope({y, x, positions, table, RopeDirection::kForward});
    return std::vector{y};
  });
}

// A wide table is that of a narrow one with gains, and the inverse is its transpose.
TEST(Rope, GainsScaleTheRotatedChannels) {
  for (const int64_t dim : {2, 10, 34}) {
    const auto frequencies = rope_frequencies(dim, kTheta);
    const Tensor x = random_tensor({5, 3, dim}, DType::kF64, 1), positions = ids({0, 7, 2, 7, 49}),
                 narrow = rope_table(50, frequencies, 1, DType::kF64),
                 wide = rope_table(50, frequencies, 1, DType::kF64, rope_gain),
                 ones = rope_table(50, frequencies, 1, DType::kF64,
                                   [](int64_t, int64_t) { return 1.0; });
    ASSERT_EQ(wide.shape(), (Shape{50, 2 * dim}));
    Tensor plain = Tensor::empty_like(x), y = plain.clone(), same = x.clone(), sum = x.clone(),
           unit = y.clone();
    rope({.y = plain, .x = x, .positions = positions, .table = narrow, .plain_heads = 1});
    for (Tensor* out : {&y, &same})
      rope({.y = *out,
            .x = out == &y ? x : same,
            .positions = positions,
            .table = wide,
            .plain_heads = 1});
    rope({.y = sum,
          .x = x,
          .positions = positions,
          .table = wide,
          .mode = Grad::kAccumulate,
          .plain_heads = 1});
    rope({.y = unit, .x = x, .positions = positions, .table = ones, .plain_heads = 1});
    EXPECT_TRUE(bit_equal(unit, plain));
    EXPECT_TRUE(bit_equal(same, y));
    for (int64_t i = 0; i < x.numel(); ++i) {
      const bool rotated = i / dim % 3 < 2;
      const double by = rotated ? rope_gain(positions.data<int32_t>()[i / (3 * dim)], i % dim) : 1;
      EXPECT_NEAR(y.data<double>()[i], by * plain.data<double>()[i], 1e-13) << i;
      EXPECT_EQ(sum.data<double>()[i], x.data<double>()[i] + y.data<double>()[i]) << i;
    }
    // <dy, rope(x)> = <inverse(dy), x>
    const Tensor dy = random_tensor(x.shape(), DType::kF64, 2);
    Tensor dx = Tensor::empty_like(x);
    rope({.y = dx,
          .x = dy,
          .positions = positions,
          .table = wide,
          .direction = RopeDirection::kInverse,
          .plain_heads = 1});
    double left = 0, right = 0;
    for (int64_t i = 0; i < x.numel(); ++i) {
      left += dy.data<double>()[i] * y.data<double>()[i];
      right += dx.data<double>()[i] * x.data<double>()[i];
    }
    EXPECT_NEAR(left, right, 1e-11 * std::fabs(left) + 1e-12);
  }
}

TEST(Rope, TablesOfDifferentLengthAgree) {
  EXPECT_TRUE(bit_equal(
      rope_table(10, rope_frequencies(8, kTheta), 1, DType::kF32),
      rope_table(100, rope_frequencies(8, kTheta), 1, DType::kF32).narrow(0, 0, 10).contiguous()));
}

TEST(Rope, BadPositionsAreNamedBeforeAnythingIsWritten) {
  const Tensor x = Tensor::zeros({2, 1, 4}, DType::kF32);
  Tensor y = Tensor::full({2, 1, 4}, 7, DType::kF32);
  const Tensor table = rope_table(8, rope_frequencies(4, kTheta), 1, DType::kF32);
  EXPECT_THROW_WITH(rope({y, x, ids({0, 8}), table, RopeDirection::kForward}), Error,
                    "position 8 of token 1 is outside the table of 8");
  EXPECT_THROW_WITH(rope({y, x, ids({-1, 0}), table, RopeDirection::kForward}), Error,
                    "position -1 of token 0");
  EXPECT_TRUE(bit_equal(y, Tensor::full({2, 1, 4}, 7, DType::kF32)));
  EXPECT_THROW_WITH(
      rope({y, x, ids({0, 1}), rope_table(8, rope_frequencies(6, kTheta), 1, DType::kF32),
            RopeDirection::kForward}),
      Error, "expected table f32[8, 4]");
  EXPECT_THROW_WITH(rope_frequencies(5, kTheta), Error, "even head_dim");
}

}  // namespace
}  // namespace cohort::kernels
