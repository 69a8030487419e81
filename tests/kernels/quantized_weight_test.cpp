// Weights in 8 and 4 bits against their definition, and against bitsandbytes.
#include "kernels/quantized_weight.h"

#include <cmath>

#include "tests/support/tensor_files.h"

namespace cohort::kernels {
namespace {

constexpr WeightFormat kFormats[] = {WeightFormat::kInt8, WeightFormat::kNf4Single,
                                     WeightFormat::kNf4};

Tensor dequantized(const QuantizedWeight& w, DType dtype = DType::kF32) {
  Tensor y = Tensor::empty({w.values.dim(0), w.columns}, dtype, w.values.device());
  dequantize_weight({y, w});
  return y;
}

// As in scripts/make_quantized.py.
Tensor matrix(int64_t rows, int64_t columns) {
  std::vector<float> x(static_cast<size_t>(rows * columns));
  for (int64_t i = 0; i < rows * columns; ++i)
    x[static_cast<size_t>(i)] = static_cast<float>(std::ldexp(
        static_cast<double>(i * 7919 % 1009 - 504), static_cast<int>(-9 - i / 64 * 5 % 7)));
  return Tensor::from(x, {rows, columns});
}

TEST(QuantizedWeights, HaveTheBytesOfBitsandbytes) {
  struct Case {
    int64_t rows, columns;
    WeightFormat format;
    const char *values, *scales, *bits;
  };
  for (const Case& c : {Case{8, 128, WeightFormat::kNf4Single, "1df28665f13902e8",
                             "c91696a3aa3264cc", "ec43bfb6b123c855"},
                        Case{8, 128, WeightFormat::kNf4, "1df28665f13902e8", "c496e14eb98c51b8",
                             "e11d7ebdaf9d04bd"},
                        Case{96, 512, WeightFormat::kNf4Single, "9c39f25ccb0c9010",
                             "c8b7d298262b36f8", "182f95a62ace1dce"},
                        Case{96, 512, WeightFormat::kNf4, "9c39f25ccb0c9010", "83d99c22358d779b",
                             "e775e6ddbf444a4b"}}) {
    const QuantizedWeight w = quantize_weight(matrix(c.rows, c.columns), c.format);
    EXPECT_EQ(cohort::test::fnv(w.values), c.values);
    EXPECT_EQ(cohort::test::fnv(w.scales), c.scales);
    EXPECT_EQ(cohort::test::fnv(dequantized(w).to(DType::kBF16)), c.bits);
  }
}

// Each number becomes the nearest value of its group, for groups of all lengths.
TEST(QuantizedWeights, AreTheNearestValuesOfTheirGroups) {
  for (const WeightFormat format : {WeightFormat::kInt8, WeightFormat::kNf4Single})
    for (int64_t columns = 1; columns <= 200; columns += columns < 70 ? 1 : 13) {
      const Tensor x = test::random_tensor({3, columns}, DType::kF32, 5 + columns, 0.1);
      const QuantizedWeight w = quantize_weight(x, format);
      const auto values = dequantized(w, DType::kF64).to_vector<double>(),
                 numbers = x.to_vector<double>();
      for (int64_t r = 0; r < 3; ++r)
        for (int64_t c = 0; c < columns; ++c) {
          const auto at = static_cast<size_t>(r * columns + c);
          double amax = 0;
          const int64_t first = c / w.group() * w.group();
          for (int64_t i = first; i < std::min(columns, first + w.group()); ++i)
            amax = std::max(amax, std::abs(numbers[static_cast<size_t>(r * columns + i)]));
          double nearest = HUGE_VAL;
          for (int i = format == WeightFormat::kInt8 ? -127 : 0;
               i < (format == WeightFormat::kInt8 ? 128 : 16); ++i) {
            const double v = amax * (format == WeightFormat::kInt8 ? i / 127.0 : nf4_value(i));
            if (std::abs(v - numbers[at]) < std::abs(nearest - numbers[at])) nearest = v;
          }
          // bf16 rounds by 2^-8 of the value at most.
          EXPECT_NEAR(values[at], nearest, 1e-6 * amax + std::abs(nearest) * 0x1p-8)
              << columns << " " << r << " " << c;
        }
    }
}

TEST(QuantizedWeights, OfZerosDenormalsAndLargeNumbers) {
  for (const WeightFormat format : kFormats) {
    EXPECT_EQ(dequantized(quantize_weight(Tensor::zeros({2, 70}, DType::kF32), format))
                  .to_vector<float>(),
              std::vector<float>(140, 0));
    for (const float x : {1e-45f, 1e-40f, 1e-38f, 1e-20f, 1.0f, 1e38f, 3.3e38f}) {
      const auto y = dequantized(quantize_weight(Tensor::full({1, 3}, x, DType::kF32), format))
                         .to_vector<float>();
      for (const float v : y) EXPECT_TRUE(std::isfinite(v)) << x;
      if (x >= 1e-36f && format != WeightFormat::kNf4) {
        EXPECT_NEAR(y[0] / x, 1, 0.005) << x;
      }
    }
    for (const float x : {INFINITY, -INFINITY, NAN})
      EXPECT_THROW_WITH(quantize_weight(Tensor::full({1, 3}, x, DType::kF32), format), Error,
                        "row 0 has a number that is not finite");
  }
}

// All dtypes have the same values, in columns of a wider matrix too.
TEST(QuantizedWeights, AreBf16InEveryDtype) {
  for (const WeightFormat format : kFormats) {
    const QuantizedWeight w =
        quantize_weight(test::random_tensor({9, 131}, DType::kF32, 3, 1), format);
    const auto values = dequantized(w).to_vector<double>();
    EXPECT_EQ(dequantized(w, DType::kF64).to_vector<double>(), values);
    for (const double v : values) EXPECT_EQ(v, static_cast<double>(bf16(static_cast<float>(v))));
    const Tensor wide = Tensor::full({9, 140}, 7, DType::kF32);
    Tensor columns = wide.narrow(1, 4, 131);
    dequantize_weight({columns, w});
    EXPECT_EQ(columns.to_vector<double>(), values);
    EXPECT_EQ(wide.narrow(1, 0, 4).to_vector<double>(), std::vector<double>(36, 7));
    EXPECT_EQ(dequantized(w.rows(2, 5)).to_vector<double>(),
              std::vector<double>(values.begin() + 2 * 131, values.begin() + 7 * 131));
  }
}

TEST(QuantizedWeights, OtherShapesAreErrors) {
  const QuantizedWeight w =
      quantize_weight(test::random_tensor({4, 64}, DType::kF32, 3, 1), WeightFormat::kInt8);
  Tensor narrow = Tensor::empty({4, 63}, DType::kF32), few = Tensor::empty({3, 64}, DType::kF32);
  EXPECT_THROW_WITH(dequantize_weight({narrow, w}), Error, "expected 63 columns, got 64");
  EXPECT_THROW_WITH(dequantize_weight({few, w}), Error, "[dequantize_weight]");
  EXPECT_THROW_WITH(QuantizedWeight::empty(WeightFormat::kModel, {2, 2}), Error, "8 or 4 bits");
}

}  // namespace
}  // namespace cohort::kernels
