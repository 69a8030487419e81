#include "kernels/dropout.h"

#include "tests/kernels/kernel_test.h"

namespace cohort::kernels {
namespace {

using namespace test;

DropoutSpec spec(double p, std::vector<int64_t> sequences, std::vector<int32_t> positions) {
  return {.p = p,
          .seed = 11,
          .stream = rng_stream(kDropoutPurpose, 3, 2 << 8 | 3),
          .sequences = Tensor::from(sequences),
          .positions = Tensor::from(positions)};
}

TEST(Dropout, KeepsElementsByTheAddressedBits) {
  const DropoutSpec s = spec(0.3, {5, 5, 9}, {0, 1, 1});
  for (const int64_t cols : {1, 3, 17, 65})
    for (const DType dtype : {DType::kF64, DType::kF32}) {
      const Tensor x = random_tensor({3, cols}, dtype, 1);
      Tensor y = Tensor::full({3, cols}, NAN, dtype), sum = Tensor::full({3, cols}, 2, dtype);
      dropout({y, x, s});
      dropout({sum, x, s, Grad::kAccumulate});
      const auto in = x.to_vector<double>(), out = y.to_vector<double>();
      const auto added = sum.to_vector<double>();
      for (int64_t t = 0; t < 3; ++t)
        for (int64_t c = 0; c < cols; ++c) {
          const auto i = static_cast<size_t>(t * cols + c);
          const bool keep =
              dropout_keep(s.seed, s.stream, s.sequences.data<int64_t>()[t],
                           s.positions.data<int32_t>()[t], static_cast<uint64_t>(c), 0.3f);
          EXPECT_NEAR(out[i], keep ? in[i] / 0.7 : 0, 1e-6 * std::fabs(in[i]));
          EXPECT_NEAR(added[i], 2 + out[i], 1e-6 * (2 + std::fabs(out[i])));
        }
    }
}

// Comparing words is equivalent to comparing the uniform numbers, on both sides of the threshold.
TEST(Dropout, FirstKeptWordIsTheThreshold) {
  for (const float p : {0.0f, 1e-30f, 0x1p-24f, 0.1f, 0.3f, 0.5f, 0.75f, 0.9999f, 1 - 0x1p-24f}) {
    const uint32_t first = dropout_first_kept(p);
    EXPECT_GE(uniform_f32(first), p);
    EXPECT_GE(uniform_f32(0xffffffffu), p);
    if (first > 0) {
      EXPECT_LT(uniform_f32(first - 1), p);
    }
  }
}

TEST(Dropout, BitsDoNotDependOnTheBatch) {
  const Tensor x = random_tensor({4, 33}, DType::kF32, 1);
  const std::vector<int64_t> sequences = {1, 1, 2, 7};
  const std::vector<int32_t> positions = {0, 1, 0, 30};
  Tensor all = Tensor::empty_like(x);
  dropout({all, x, spec(0.5, sequences, positions)});
  for (int64_t t = 0; t < 4; ++t) {
    Tensor one = Tensor::empty({1, 33}, DType::kF32);
    const auto i = static_cast<size_t>(t);
    dropout({one, x.narrow(0, t, 1), spec(0.5, {sequences[i]}, {positions[i]})});
    EXPECT_TRUE(bit_equal(one, all.narrow(0, t, 1)));
  }
}

TEST(Dropout, RatesAreRightAndStreamsDiffer) {
  const int64_t tokens = 100, cols = 100;
  std::vector<int64_t> sequences(100, 0);
  std::vector<int32_t> positions(100);
  for (size_t i = 0; i < 100; ++i) positions[i] = static_cast<int32_t>(i);
  const Tensor x = Tensor::full({tokens, cols}, 1, DType::kF64);
  DropoutSpec s = spec(0.1, sequences, positions);
  Tensor y = Tensor::empty_like(x), other = Tensor::empty_like(x);
  dropout({y, x, s});
  int64_t dropped = 0;
  for (const double v : y.to_vector<double>()) dropped += v == 0;
  // 10000 random numbers of probability 0.1: five standard deviations of 30.
  EXPECT_NEAR(static_cast<double>(dropped), 1000, 150);
  const auto differs = [&](auto change) {
    DropoutSpec changed = s;
    change(changed);
    dropout({other, x, changed});
    return !bit_equal(other, y);
  };
  EXPECT_TRUE(differs([](DropoutSpec& d) { d.seed++; }));
  EXPECT_TRUE(differs([](DropoutSpec& d) { d.stream++; }));
  expect_thread_invariant([&] {
    Tensor z = Tensor::empty_like(x);
    dropout({z, x, s});
    return std::vector{z};
  });
}

TEST(Dropout, ZeroProbabilityCopiesOrAdds) {
  const Tensor x = random_tensor({3, 5}, DType::kF64, 1);
  Tensor y = Tensor::empty_like(x), twice = x.clone();
  dropout({y, x, {}});
  dropout({twice, x, {}, Grad::kAccumulate});
  EXPECT_TRUE(bit_equal(y, x));
  for (int64_t i = 0; i < x.numel(); ++i)
    EXPECT_EQ(twice.data<double>()[i], 2 * x.data<double>()[i]);
}

TEST(Dropout, SaysWhatIsWrong) {
  const Tensor x = Tensor::zeros({2, 3}, DType::kF32);
  Tensor y = Tensor::zeros({2, 3}, DType::kF32);
  EXPECT_THROW_WITH(dropout({y, x, spec(1, {0, 0}, {0, 1})}), Error, "p in [0, 1), got 1");
  EXPECT_THROW_WITH(dropout({y, x, spec(0.99999999, {0, 0}, {0, 1})}), Error, "p in [0, 1)");
  EXPECT_THROW_WITH(dropout({y, x, spec(0.5, {0}, {0, 1})}), Error, "sequences i64[2]");
  EXPECT_THROW_WITH(dropout({y, x, spec(0.5, {0, 0}, {0})}), Error, "positions i32[2]");
}

}  // namespace
}  // namespace cohort::kernels
