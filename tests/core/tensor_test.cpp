// Views, copies, conversions and bf16 rounding.
#include "core/tensor.h"

#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/allocator.h"
#include "core/rng.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

// The values 0, 1, 2, ... in `shape`.
Tensor counting(const Shape& shape, DType dtype = DType::kF32) {
  std::vector<double> values(static_cast<size_t>(shape.numel()));
  std::iota(values.begin(), values.end(), 0);
  return Tensor::from(values, shape).to(dtype);
}

using Ints = std::vector<int64_t>;

uint16_t bf16_bits(float value) {
  return bf16(value).bits;
}
float from_bits(uint32_t bits) {
  return std::bit_cast<float>(bits);
}

}  // namespace

TEST(Tensor, FactoriesFillAndDescribe) {
  EXPECT_EQ(Tensor::zeros({2, 2}, DType::kI32).to_vector<int64_t>(), Ints(4, 0));
  EXPECT_EQ(Tensor::full({3}, 2.5, DType::kF64).to_vector<double>(), std::vector<double>(3, 2.5));
  const Tensor t = counting({2, 3});
  EXPECT_EQ(t.str(), "f32[2, 3] on cpu");
  EXPECT_EQ(t.nbytes(), 24);
  EXPECT_EQ(t.rows(), 2);
  EXPECT_EQ(t.cols(), 3);
  EXPECT_TRUE(t.is_contiguous());
  EXPECT_EQ(Tensor::full({}, 4, DType::kF32).item(), 4);
  EXPECT_EQ(Tensor::zeros({0, 3}, DType::kF32).numel(), 0);
  EXPECT_EQ(Tensor::zeros({3, 0}, DType::kF32).rows(), 0);
}

TEST(Tensor, UndefinedTensorsHaveNoData) {
  const Tensor t;
  EXPECT_FALSE(t.defined());
  EXPECT_EQ(t.numel(), 0);
  EXPECT_EQ(t.str(), "undefined tensor");
  EXPECT_THROW_WITH(t.raw(), Error, "undefined");
  EXPECT_THROW_WITH(t.data<float>(), Error, "undefined tensor");
}

TEST(Tensor, BadArgumentsThrow) {
  EXPECT_THROW_WITH(Tensor::empty({2, -1}, DType::kF32), Error, "negative size");
  EXPECT_THROW_WITH(Tensor::from(std::vector<float>{1, 2, 3}, {2}), Error, "3 values for shape");
  EXPECT_THROW_WITH(counting({2}).data<double>(), Error, "expected elements of type f64");
  EXPECT_THROW_WITH(counting({2}).item(), Error, "expected one element");
  EXPECT_THROW_WITH((Shape{1, 1, 1, 1, 1, 1, 1}), Error, "rank 7 exceeds 6");
}

TEST(Tensor, ReshapeSharesStorageAndInfersOneSize) {
  Tensor t = counting({2, 6});
  const Tensor v = t.reshape({3, -1});
  EXPECT_EQ(v.shape(), (Shape{3, 4}));
  EXPECT_EQ(v.raw(), t.raw());
  t.data<float>()[11] = 99;
  EXPECT_EQ(v.to_vector<int64_t>().back(), 99);
  EXPECT_THROW_WITH(t.reshape({5, -1}), Error, "[reshape] cannot turn");
  EXPECT_THROW_WITH(t.reshape({}), Error, "[reshape] cannot turn");
  EXPECT_THROW_WITH(t.narrow(0, 0, 0).reshape({0, -1}), Error, "[reshape] cannot turn");
  EXPECT_THROW_WITH(t.reshape({-3, -4}), Error, "[reshape] cannot turn");
  // Their product is 12 modulo 2^64.
  EXPECT_THROW_WITH(t.reshape({7, 2635249153387078804}), Error, "[reshape] cannot turn");
  EXPECT_THROW_WITH(t.reshape({-1, -1}), Error, "more than one -1");
}

TEST(Tensor, ReshapeKeepsAStrideOfTheFirstDimension) {
  const Tensor t = counting({3, 6}).narrow(1, 0, 4);
  const Tensor view = t.reshape({3, 2, -1});
  EXPECT_EQ(view.strides(), (Shape{6, 2, 1}));
  EXPECT_EQ(view.to_vector<int64_t>(), t.to_vector<int64_t>());
  EXPECT_EQ(view.reshape({3, 4}).strides(), t.strides());
  EXPECT_EQ(t.narrow(0, 0, 0).reshape({0, 2, 2}).shape(), (Shape{0, 2, 2}));
  EXPECT_THROW_WITH(t.reshape({2, 6}), Error, "[reshape] needs a contiguous tensor");
  EXPECT_THROW_WITH(t.reshape({12}), Error, "[reshape] needs a contiguous tensor");
  EXPECT_THROW_WITH(view.narrow(2, 0, 1).reshape({3, 2}), Error, "[reshape] needs a contiguous");
}

TEST(Tensor, NarrowSelectAndTransposeAreViews) {
  Tensor t = counting({3, 4});
  Tensor column = t.select(1, 2);
  EXPECT_EQ(column.to_vector<int64_t>(), (Ints{2, 6, 10}));
  EXPECT_FALSE(column.is_contiguous());
  EXPECT_EQ(t.select(-1, 2).to_vector<int64_t>(), (Ints{2, 6, 10}));
  EXPECT_EQ(t.select(0, 1).to_vector<int64_t>(), (Ints{4, 5, 6, 7}));
  EXPECT_TRUE(t.select(0, 1).is_contiguous());
  const Tensor middle = t.narrow(1, 1, 2);
  EXPECT_EQ(middle.to_vector<int64_t>(), (Ints{1, 2, 5, 6, 9, 10}));
  EXPECT_EQ(t.narrow(0, 2, 0).numel(), 0);
  const Tensor transposed = t.transpose(0, 1);
  EXPECT_EQ(transposed.shape(), (Shape{4, 3}));
  EXPECT_EQ(transposed.to_vector<int64_t>(), (Ints{0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11}));
  EXPECT_EQ(transposed.narrow(0, 1, 2).select(1, 1).to_vector<int64_t>(), (Ints{5, 6}));
  // Writes through a view change the tensor.
  column.fill_(-1);
  EXPECT_EQ(t.to_vector<int64_t>(), (Ints{0, 1, -1, 3, 4, 5, -1, 7, 8, 9, -1, 11}));
  EXPECT_THROW_WITH(t.narrow(0, 2, 2), Error, "[narrow]");
  EXPECT_THROW_WITH(t.narrow(0, -1, 1), Error, "[narrow]");
  EXPECT_THROW_WITH(t.select(1, 4), Error, "[narrow]");
  EXPECT_THROW_WITH(transposed.reshape({12}), Error, "[reshape] needs a contiguous tensor");
}

TEST(Tensor, ConversionsCopyOnlyIfNeeded) {
  Tensor t = counting({2, 3});
  EXPECT_EQ(t.contiguous().raw(), t.raw());
  EXPECT_EQ(t.to(DType::kF32).raw(), t.raw());
  EXPECT_EQ(t.to(Device{}).raw(), t.raw());
  EXPECT_NE(t.clone().raw(), t.raw());
  const Tensor transposed = t.transpose(0, 1);
  EXPECT_NE(transposed.contiguous().raw(), t.raw());
  EXPECT_TRUE(transposed.contiguous().is_contiguous());
  EXPECT_EQ(transposed.clone().to_vector<int64_t>(), (Ints{0, 3, 1, 4, 2, 5}));
}

TEST(Tensor, CopyWritesThroughStridesAndConverts) {
  Tensor t = Tensor::zeros({3, 4}, DType::kF64);
  t.narrow(1, 1, 2).transpose(0, 1).copy_(counting({2, 3}, DType::kI32));
  EXPECT_EQ(t.to_vector<int64_t>(), (Ints{0, 0, 3, 0, 0, 1, 4, 0, 0, 2, 5, 0}));
  EXPECT_THROW_WITH(t.copy_(counting({4, 3})), Error, "[copy_]");
}

TEST(Tensor, ConversionsBetweenAllTypes) {
  const std::vector<DType> all = {DType::kF64, DType::kF32, DType::kBF16, DType::kI32, DType::kI64,
                                  DType::kU8,  DType::kF16, DType::kE4M3, DType::kI8};
  for (const DType from : all)
    for (const DType to : all) {
      const Tensor t = counting({5}, from).to(to);
      EXPECT_EQ(t.dtype(), to);
      EXPECT_EQ(t.to_vector<int64_t>(), (Ints{0, 1, 2, 3, 4}))
          << dtype_name(from) << dtype_name(to);
    }
  // Truncates like a C++ conversion; 64-bit integers are not converted through a floating type.
  EXPECT_EQ(Tensor::from(std::vector<double>{-1.9, 1.9}).to(DType::kI32).to_vector<int64_t>(),
            (Ints{-1, 1}));
  const int64_t big = (int64_t{1} << 62) + 1;
  EXPECT_EQ(Tensor::from(std::vector<int64_t>{big}).clone().to_vector<int64_t>(), Ints{big});
}

TEST(Tensor, FreesItsStorage) {
  const int64_t before = allocator(Device{}).stats().live_bytes;
  {
    const Tensor t = Tensor::zeros({1000}, DType::kF64);
    const Tensor view = t.narrow(0, 1, 3);
    EXPECT_EQ(allocator(Device{}).stats().live_bytes - before, 8192);
  }
  EXPECT_EQ(allocator(Device{}).stats().live_bytes, before);
}

TEST(F16, ConvertsEveryNumberBack) {
  for (uint32_t bits = 0; bits < 1 << 16; ++bits) {
    f16 half;
    half.bits = static_cast<uint16_t>(bits);
    const auto value = static_cast<float>(half);
    if (std::isnan(value)) {
      EXPECT_EQ(f16(value).bits & 0x7fff, 0x7e00) << bits;
    } else {
      EXPECT_EQ(f16(value).bits, bits);
    }
  }
}

TEST(F16, RoundsToNearestEven) {
  const auto bits = [](double value) { return f16(value).bits; };
  EXPECT_EQ(bits(1), 0x3c00);
  EXPECT_EQ(bits(-2), 0xc000);
  EXPECT_EQ(bits(-0.0), 0x8000);
  // Midpoints of neighbours, below and above them, and once where rounding to f32 first is wrong.
  EXPECT_EQ(bits(1 + 0x1p-11), 0x3c00);
  EXPECT_EQ(bits(1 + 0x1.8p-10), 0x3c02);
  EXPECT_EQ(bits(1 + 0x1.000001p-11), 0x3c01);
  EXPECT_EQ(bits(1 + 0x1p-11 + 0x1p-40), 0x3c01);
  // The largest number, infinity, and subnormals.
  EXPECT_EQ(bits(65519.99), 0x7bff);
  EXPECT_EQ(bits(65520), 0x7c00);
  EXPECT_EQ(bits(-1e300), 0xfc00);
  EXPECT_EQ(bits(0x1p-24), 0x0001);
  EXPECT_EQ(bits(0x1p-25), 0x0000);
  EXPECT_EQ(bits(0x1.8p-24), 0x0002);
  EXPECT_EQ(bits(0x1.ffep-15), 0x0400);
}

// The number of a byte by the definition of the format.
double e4m3_value(int bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  const double magnitude = exponent == 15 && mantissa == 7 ? NAN
                           : exponent == 0                 ? std::ldexp(mantissa, -9)
                                           : std::ldexp(8 + mantissa, exponent - 10);
  return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

TEST(E4m3, HasTheNumbersOfTheFormat) {
  for (int bits = 0; bits < 256; ++bits) {
    e4m3 x;
    x.bits = static_cast<uint8_t>(bits);
    const auto value = static_cast<float>(x);
    if ((bits & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(value));
      EXPECT_EQ(e4m3(value).bits, 0x7f);
      continue;
    }
    EXPECT_EQ(value, e4m3_value(bits));
    EXPECT_EQ(std::signbit(value), bits >= 0x80);
    EXPECT_EQ(e4m3(value).bits, bits);
  }
  EXPECT_EQ(e4m3_value(0x7e), 448);
}

TEST(E4m3, RoundsToTheNearestAndTiesToEven) {
  const auto bits = [](float value) { return e4m3(value).bits; };
  // At, just below and just above each midpoint of two neighbours, and of each number.
  for (int low = 0; low < 0x7e; ++low) {
    const auto middle = static_cast<float>((e4m3_value(low) + e4m3_value(low + 1)) / 2);
    EXPECT_EQ(bits(middle), low + (low & 1)) << low;
    EXPECT_EQ(bits(std::nextafterf(middle, 0)), low) << low;
    EXPECT_EQ(bits(std::nextafterf(middle, 1e9f)), low + 1) << low;
    EXPECT_EQ(bits(-middle), 0x80 + low + (low & 1)) << low;
  }
  EXPECT_EQ(bits(0x1p-149f), 0);
  EXPECT_EQ(bits(-0.0f), 0x80);
  for (const float large : {448.0f, 463.0f, 465.0f, 1e30f, std::numeric_limits<float>::max()}) {
    EXPECT_EQ(bits(large), 0x7e);
    EXPECT_EQ(bits(-large), 0xfe);
  }
  EXPECT_EQ(bits(std::numeric_limits<float>::infinity()), 0x7f);
  EXPECT_EQ(bits(-std::numeric_limits<float>::infinity()), 0xff);
  EXPECT_EQ(bits(from_bits(0x7f800001)), 0x7f);
  EXPECT_EQ(bits(from_bits(0xffc00000)), 0xff);
}

TEST(Bf16, RoundsToNearestEven) {
  EXPECT_EQ(bf16_bits(1.0f), 0x3f80);
  EXPECT_EQ(bf16_bits(-1.0f), 0xbf80);
  EXPECT_EQ(bf16_bits(0.0f), 0x0000);
  EXPECT_EQ(bf16_bits(-0.0f), 0x8000);
  // Below, at and above the midpoint of two neighbours, with an even and an odd lower neighbour.
  EXPECT_EQ(bf16_bits(from_bits(0x3f807fff)), 0x3f80);
  EXPECT_EQ(bf16_bits(from_bits(0x3f808000)), 0x3f80);
  EXPECT_EQ(bf16_bits(from_bits(0x3f808001)), 0x3f81);
  EXPECT_EQ(bf16_bits(from_bits(0x3f817fff)), 0x3f81);
  EXPECT_EQ(bf16_bits(from_bits(0x3f818000)), 0x3f82);
  EXPECT_EQ(bf16_bits(from_bits(0xbf818000)), 0xbf82);
  // A carry into the exponent, and subnormals.
  EXPECT_EQ(bf16_bits(from_bits(0x3fffffff)), 0x4000);
  EXPECT_EQ(bf16_bits(from_bits(0x00000001)), 0x0000);
  EXPECT_EQ(bf16_bits(from_bits(0x00018000)), 0x0002);
}

TEST(Bf16, InfinitiesOverflowAndNaNs) {
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(bf16_bits(inf), 0x7f80);
  EXPECT_EQ(bf16_bits(-inf), 0xff80);
  EXPECT_EQ(bf16_bits(std::numeric_limits<float>::max()), 0x7f80);  // rounds to infinity
  EXPECT_EQ(bf16_bits(from_bits(0x7f7f7fff)), 0x7f7f);
  // NaNs stay NaNs, including those with payload only in the dropped half, and keep their sign.
  for (const uint32_t bits : {0x7fc00000u, 0x7f800001u, 0x7fffffffu, 0xff800001u, 0xffffffffu}) {
    const bf16 value(from_bits(bits));
    EXPECT_TRUE(std::isnan(static_cast<float>(value))) << std::hex << bits;
    EXPECT_EQ(value.bits >> 15, bits >> 31);
  }
}

// Checks an independent rule: no other bf16 is nearer, and ties go to the even one.
TEST(Bf16, IsTheNearestForRandomBits) {
  Rng rng(1, rng_stream(kTestPurpose));
  for (int i = 0; i < 20000; ++i) {
    const float value = from_bits(static_cast<uint32_t>(rng.bits()));
    if (!(std::fabs(value) < 3e38f)) continue;
    const uint16_t bits = bf16_bits(value);
    const auto distance = [&](uint16_t b) {
      bf16 other;
      other.bits = b;
      return std::fabs(static_cast<double>(other) - static_cast<double>(value));
    };
    for (const int step : {-1, 1}) {
      const auto neighbour = static_cast<uint16_t>(bits + step);
      if ((neighbour ^ bits) & 0x8000) continue;  // across zero
      ASSERT_LE(distance(bits), distance(neighbour));
      const bool tie = distance(bits) == distance(neighbour);
      ASSERT_FALSE(tie && (bits & 1));
    }
  }
}

TEST(Tensor, PaddingIsSeenOnlyByWithPadding) {
  for (const int dim : {0, 1}) {
    const Tensor all = Tensor::full({4, 6}, 7, DType::kF32);
    Tensor view = all.hide_padding(dim, 3);
    EXPECT_EQ(view.dim(dim), 3);
    EXPECT_EQ(view.is_contiguous(), dim == 0);
    EXPECT_EQ(view.with_padding().shape(), all.shape());
    EXPECT_EQ(view.with_padding().raw(), view.raw());
    view.fill_(1);
    double sum = 0;
    for (const double x : all.to_vector<double>()) sum += x;
    EXPECT_EQ(sum, view.numel() + 7 * (24 - view.numel()));
    // Other views and copies have none.
    for (const Tensor& t :
         {view.narrow(1 - dim, 0, 2), view.transpose(0, 1), view.clone(), view.select(0, 0),
          view.contiguous().reshape({-1}), view.with_padding()})
      EXPECT_EQ(t.with_padding().shape(), t.shape());
  }
  const Tensor whole = Tensor::zeros({2, 3}, DType::kF32);
  EXPECT_EQ(whole.hide_padding(0, 2).with_padding().shape(), whole.shape());
  EXPECT_EQ(Tensor::zeros({}, DType::kF32).with_padding().rank(), 0);
  EXPECT_FALSE(Tensor().with_padding().defined());
  EXPECT_THROW_WITH(whole.hide_padding(0, 3), Error, "[narrow]");
}

TEST(Bf16, TensorRoundTripKeepsTheBits) {
  std::vector<bf16> values(1 << 16);
  for (size_t i = 0; i < values.size(); ++i) values[i].bits = static_cast<uint16_t>(i);
  const Tensor t = Tensor::from(values);
  const Tensor back = t.to(DType::kF32).to(DType::kBF16);
  const bf16 *a = t.data<bf16>(), *b = back.data<bf16>();
  for (size_t i = 0; i < values.size(); ++i) {
    if (std::isnan(static_cast<float>(a[i])))
      ASSERT_TRUE(std::isnan(static_cast<float>(b[i])));
    else
      ASSERT_EQ(a[i].bits, b[i].bits);
  }
}

TEST(Dispatch, ComputeTypesAreTheTwoFloats) {
  EXPECT_EQ(dispatch_float(DType::kF64, "op", []<class T>() { return sizeof(T); }), 8u);
  EXPECT_EQ(dispatch_float(DType::kF32, "op", []<class T>() { return sizeof(T); }), 4u);
  EXPECT_THROW_WITH(dispatch_float(DType::kBF16, "op", []<class T>() { return sizeof(T); }), Error,
                    "[op] expected f64 or f32, got bf16");
}

TEST(Tensor, BorrowedMemoryIsReleasedWithTheLastView) {
  std::vector<float> memory = {0, 1, 2, 3, 4, 5, 6, 7};
  int released = 0;
  {
    Tensor view;
    {
      const Tensor t = Tensor::borrow(
          memory.data() + 1, [&] { ++released; }, {2, 1, 3}, {4, 9, 1}, DType::kF32);
      EXPECT_EQ(t.raw(), memory.data() + 1);
      EXPECT_FALSE(t.is_contiguous());
      EXPECT_FALSE(t.sole_owner());  // nothing may overwrite it in place
      EXPECT_EQ(t.strides(), (Shape{4, 3, 1}));
      view = t.select(0, 1);
    }
    EXPECT_EQ(released, 0);
    EXPECT_TRUE(view.is_contiguous());
    EXPECT_EQ(view.to_vector<double>(), (std::vector<double>{5, 6, 7}));
    view.fill_(9);
    EXPECT_EQ(memory, (std::vector<float>{0, 1, 2, 3, 4, 9, 9, 9}));
  }
  EXPECT_EQ(released, 1);
}

TEST(Tensor, BorrowRefusesMemoryThatItCannotView) {
  std::vector<float> memory(4);
  bool released = false;
  const auto borrow = [&](void* pointer, const Shape& shape, const Shape& strides) {
    return Tensor::borrow(
        pointer, [&] { released = true; }, shape, strides, DType::kF32);
  };
  EXPECT_THROW_WITH(borrow(memory.data(), {2}, {}), Error, "0 strides for shape [2]");
  EXPECT_THROW_WITH(borrow(memory.data(), {2}, {-1}), Error, "negative size or stride");
  EXPECT_THROW_WITH(borrow(reinterpret_cast<char*>(memory.data()) + 2, {1}, {1}), Error,
                    "not aligned");
  EXPECT_THROW_WITH(borrow(nullptr, {1}, {1}), Error, "no memory");
  EXPECT_FALSE(released);
  EXPECT_TRUE(borrow(nullptr, {0, 3}, {0, 0}).is_contiguous());
  EXPECT_TRUE(released);
}

}  // namespace cohort
