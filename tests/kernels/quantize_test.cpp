// The formats by their definitions in f64, and what they keep of bf16 values.
#include "kernels/quantize.h"

#include <bit>
#include <map>
#include <span>

#include "tests/kernels/quantize_cases.h"

namespace cohort::kernels {
namespace {

using namespace test;

constexpr ScaleGroups kRows = ScaleGroups::kRows, kBlocks = ScaleGroups::kBlocks;

// The least power of two, from 2^-100 on, that brings amax to 448 or less; found by trying.
double e4m3_scale(double amax) {
  if (amax == 0) return 1;
  if (!(amax <= std::ldexp(448, 100))) return NAN;
  int e = -100;
  while (std::ldexp(amax, -e) > 448) ++e;
  return std::ldexp(1, e);
}

// The nearest number of e4m3, of two the one with an even last bit, found among all of them.
double nearest_e4m3(double x) {
  double best = NAN;
  int best_bits = 0;
  for (int bits = 0; bits < 0x7f; ++bits) {
    e4m3 candidate;
    candidate.bits = static_cast<uint8_t>(bits);
    const double value = static_cast<float>(candidate), error = std::fabs(value - std::fabs(x)),
                 least = std::fabs(best - std::fabs(x));
    if (bits == 0 || error < least || (error == least && best_bits % 2 == 1)) {
      best = value;
      best_bits = bits;
    }
  }
  return std::copysign(best, x);
}

// Expects q to be x in its format, element by element.
void expect_definition(const Quantized& q, const Tensor& x) {
  const int64_t rows = x.dim(0), cols = x.dim(1);
  const bool is_i8 = q.values.dtype() == DType::kI8;
  const int64_t height = q.groups == kBlocks ? 128 : 1, width = is_i8 ? cols : 128;
  const auto numbers = x.to(DType::kF32).to(is_i8 ? DType::kF32 : DType::kBF16);
  const auto in = numbers.to_vector<double>(), values = q.values.to_vector<double>(),
             scales = q.scales.to_vector<double>();
  std::map<std::pair<int64_t, int64_t>, double> largest;  // amax of a group by its first element
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c) {
      const int64_t top = r / height * height, left = c / width * width;
      const auto [known, is_new] = largest.try_emplace({top, left}, 0.0);
      double& amax = known->second;
      for (int64_t i = top; is_new && i < std::min(rows, top + height); ++i)
        for (int64_t j = left; j < std::min(cols, left + width); ++j) {
          const double magnitude = std::fabs(in[static_cast<size_t>(i * cols + j)]);
          if (std::isfinite(amax) && !(magnitude <= amax)) amax = magnitude;
        }
      const int64_t across = (cols + 127) / 128;
      const int64_t at = is_i8                 ? r
                         : q.groups == kBlocks ? r / 128 * across + c / 128
                                               : c / 128 * ((rows + 3) / 4 * 4) + r;
      const double scale = scales[static_cast<size_t>(at)],
                   value = values[static_cast<size_t>(r * cols + c)],
                   source = in[static_cast<size_t>(r * cols + c)];
      if (!std::isfinite(amax) || (!is_i8 && amax > std::ldexp(448, 100))) {
        ASSERT_TRUE(std::isnan(scale)) << r << ", " << c;
        ASSERT_TRUE(is_i8 ? value == 0 : std::isnan(value)) << r << ", " << c;
        continue;
      }
      if (is_i8) {
        const float expected = std::fmax(static_cast<float>(amax) / 127.0f, 0x1p-126f);
        ASSERT_EQ(scale, amax == 0 ? 1 : expected);
        ASSERT_EQ(value, std::nearbyint(static_cast<float>(source) / static_cast<float>(scale)));
      } else {
        ASSERT_EQ(scale, e4m3_scale(amax)) << amax;
        ASSERT_EQ(value, nearest_e4m3(source / scale)) << source << " / " << scale;
        ASSERT_EQ(std::signbit(value), std::signbit(source));
      }
    }
}

TEST(Quantize, FollowsItsDefinition) {
  for (const auto& [dtype, groups] : formats())
    for (const Shape& shape : quantize_shapes())
      for (const DType in : {DType::kF32, DType::kF64}) {
        SCOPED_TRACE(str(dtype_name(dtype), shape.str(), groups == kBlocks ? " blocks" : ""));
        const Tensor x = mixed_values(shape, in, static_cast<uint64_t>(shape[0]));
        const Quantized q = quantized(x, dtype, groups);
        expect_definition(q, x);
        expect_thread_invariant([&] {
          const Quantized again = quantized(x, dtype, groups);
          return std::vector{again.values, again.scales, dequantized_as(again, DType::kF32)};
        });
        EXPECT_TRUE(bit_equal(quantized(x, dtype, groups).values, q.values));
      }
}

TEST(Quantize, HoldsEveryBf16ValueOfAGroup) {
  for (const int64_t rows : {65536, 512, 16}) {
    const Tensor x = all_bf16_values(rows);
    for (const auto& [dtype, groups] : formats()) {
      SCOPED_TRACE(str(dtype_name(dtype), x.shape().str(), groups == kBlocks ? " blocks" : ""));
      if (groups == kRows || rows == 512) expect_definition(quantized(x, dtype, groups), x);
    }
  }
  // Alone in a group a value keeps four bits, so that its error is a sixteenth at most.
  const Tensor x = all_bf16_values(65536);
  const auto in = x.to_vector<double>(),
             out = dequantized_as(quantized(x, DType::kE4M3), DType::kF64).to_vector<double>();
  for (size_t i = 0; i < in.size(); ++i) {
    const double magnitude = std::fabs(in[i]);
    if (!(magnitude <= std::ldexp(448, 100))) {
      ASSERT_TRUE(std::isnan(out[i])) << in[i];
    } else if (magnitude >= std::ldexp(1, -106)) {
      ASSERT_LE(std::fabs(out[i] - in[i]), magnitude / 16) << in[i];
    }
  }
}

TEST(Quantize, HasTheBytesOfSpecialNumbers) {
  const auto bytes = [](const std::vector<float>& row) {
    const Tensor x = Tensor::from(row, {1, std::ssize(row)});
    const Quantized q = quantized(x, DType::kE4M3);
    std::vector<int> out;
    for (int64_t i = 0; i < q.values.numel(); ++i) out.push_back(q.values.data<e4m3>()[i].bits);
    return std::pair(out, q.scales.data<float>()[0]);
  };
  using Bytes = std::vector<int>;
  // 448 has scale 1, and 2^-9, half of it and -0 their bytes then; 449 is 448 in bf16.
  EXPECT_EQ(bytes({448, 0x1p-9f, 0x1p-10f, 0x1.8p-10f, -0.0f, -0x1p-9f}),
            std::pair(Bytes{0x7e, 1, 0, 1, 0x80, 0x81}, 1.0f));
  EXPECT_EQ(bytes({449}), std::pair(Bytes{0x7e}, 1.0f));
  EXPECT_EQ(bytes({450}), std::pair(Bytes{0x76}, 2.0f));
  EXPECT_EQ(bytes({0, -0.0f}), std::pair(Bytes{0, 0x80}, 1.0f));
  EXPECT_EQ(bytes({0x1p-133f, -0x1p-110f}), std::pair(Bytes{0, 0x80}, 0x1p-100f));
  for (const float bad : {INFINITY, -INFINITY, NAN, -NAN, 3.4e38f, -1e33f}) {
    const auto [values, scale] = bytes({1, bad, -2});
    EXPECT_EQ(values, (Bytes{0x7f, 0x7f, 0x7f})) << bad;
    EXPECT_EQ(std::bit_cast<uint32_t>(scale), 0x7fffffffu) << bad;
  }
  const Quantized q = quantized(
      Tensor::from(std::vector<float>{1, NAN, 0, -0.0f, -1, 127, 2.5f, 3.5f}, {4, 2}), DType::kI8);
  EXPECT_EQ(q.values.to_vector<int64_t>(), (std::vector<int64_t>{0, 0, 0, 0, -1, 127, 91, 127}));
  EXPECT_EQ(q.scales.data<float>()[1], 1);
  EXPECT_TRUE(std::isnan(q.scales.data<float>()[0]));
}

TEST(Quantize, DequantisedE4m3IsExactlyBf16) {
  for (const ScaleGroups groups : {kRows, kBlocks}) {
    Tensor x = mixed_values({130, 300}, DType::kF32, 5);
    for (float& value : std::span(x.data<float>(), static_cast<size_t>(x.numel())))
      if (!(std::fabs(value) < 1e30f)) value = 0;  // the bits of NaN depend on the dtype
    const Quantized q = quantized(x, DType::kE4M3, groups);
    const Tensor exact = dequantized_as(q, DType::kF64);
    EXPECT_TRUE(bit_equal(dequantized_as(q, DType::kBF16).to(DType::kF64), exact));
    EXPECT_TRUE(bit_equal(dequantized_as(q, DType::kF32).to(DType::kF64), exact));
    // And quantising it again changes nothing.
    const Quantized again = quantized(exact, DType::kE4M3, groups);
    EXPECT_TRUE(bit_equal(dequantized_as(again, DType::kF64), exact));
  }
}

TEST(Quantize, TransposedIsTheTranspose) {
  for (const Shape& shape : quantize_shapes()) {
    const Tensor x = mixed_values(shape, DType::kF32, 3);
    const Quantized plain = quantized(x, DType::kE4M3, kBlocks);
    Quantized turned = Quantized::empty({shape[1], shape[0]}, DType::kE4M3, kBlocks);
    quantize({turned, x.transpose(0, 1)});
    EXPECT_TRUE(bit_equal(turned.values, plain.values.transpose(0, 1).clone())) << shape.str();
    EXPECT_TRUE(bit_equal(turned.scales, plain.scales.transpose(0, 1).clone())) << shape.str();
  }
}

TEST(Quantize, ScalesBeyondTheRowsAreOne) {
  const Quantized q = quantized(random_tensor({5, 130}, DType::kF32, 1, 1e6), DType::kE4M3);
  ASSERT_EQ(q.scales.shape(), (Shape{2, 8}));
  for (int64_t column = 0; column < 8; ++column)
    EXPECT_EQ(q.scales.data<float>()[8 + column] == 1, column >= 5);
}

TEST(Quantize, RefusesWhatItsContractExcludes) {
  const Tensor x = random_tensor({4, 6}, DType::kF32, 1);
  Quantized q = Quantized::empty({4, 6}, DType::kE4M3, kRows);
  EXPECT_THROW_WITH(
      Quantized::empty({4, 6}, DType::kF32, kRows), Error,
      "[quantize] expected values [T, K] in e4m3, or in i8 with a scale for each row, "
      "got f32[4, 6]");
  EXPECT_THROW_WITH(Quantized::empty({4, 6}, DType::kI8, kBlocks), Error,
                    "got i8[4, 6] with blocks");
  EXPECT_THROW_WITH(Quantized::empty({4}, DType::kI8, kRows), Error, "got i8[4]");
  EXPECT_THROW_WITH(quantize({q, random_tensor({4, 5}, DType::kF32, 1)}), Error,
                    "[quantize] expected values e4m3[4, 5]");
  EXPECT_THROW_WITH(quantize({q, random_tensor({6, 4}, DType::kF32, 1).transpose(0, 1)}), Error,
                    "[quantize] expected contiguous x");
  EXPECT_THROW_WITH(quantize({q, x.to(DType::kBF16)}), Error,
                    "[quantize] expected f64 or f32, got bf16");
  Tensor y = Tensor::empty({4, 6}, DType::kI32);
  EXPECT_THROW_WITH(dequantize({y, q}), Error, "[dequantize] expected f64 or f32, got i32");
  q.scales = Tensor::empty({1, 5}, DType::kF32);
  EXPECT_THROW_WITH(quantize({q, x}), Error, "[quantize] expected scales f32[1, 4]");
}

}  // namespace
}  // namespace cohort::kernels
