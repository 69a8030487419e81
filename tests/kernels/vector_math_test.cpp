#include "kernels/vector_math.h"

#include <gtest/gtest.h>

#include <bit>
#include <limits>
#include <vector>

namespace cohort::kernels {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// The distance between neighbouring floats at x.
double ulp(double x) {
  const double smallest = 0x1p-149;
  if (std::fabs(x) < 0x1p-126) return smallest;
  int exponent = 0;
  std::frexp(x, &exponent);
  return std::ldexp(1.0, exponent - 24);
}

// Every bit pattern in steps of a prime: all exponents, both signs, denormals, infinities and NaNs.
template <class F>
void for_all_floats(F&& fn) {
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += 2003)
    fn(std::bit_cast<float>(static_cast<uint32_t>(bits)));
}

// Expects f within 1 ulp of the exact function over the whole range; measured: below 0.995 (on
// every 37th float).
void expect_within_one_ulp(float (*f)(float), double (*exact)(double)) {
  for_all_floats([&](float x) {
    const float got = f(x);
    if (std::isnan(x)) {
      EXPECT_TRUE(std::isnan(got));
      return;
    }
    const double expected = exact(static_cast<double>(x));
    if (std::isinf(got) || std::isinf(static_cast<float>(expected))) {
      EXPECT_EQ(got, static_cast<float>(expected)) << x;
    } else {
      EXPECT_LE(std::fabs(static_cast<double>(got) - expected), ulp(expected)) << x;
    }
  });
}

TEST(VectorMath, ExpIsWithinOneUlp) {
  expect_within_one_ulp([](float x) { return vexp(x); }, [](double x) { return std::exp(x); });
}

TEST(VectorMath, Exp2IsWithinOneUlp) {
  expect_within_one_ulp([](float x) { return vexp2(x); }, [](double x) { return std::exp2(x); });
}

// 2^-23 from the exponential, and half of that from each of the roundings of sum and quotient.
TEST(VectorMath, SigmoidIsWithinItsThreeRoundings) {
  for (float x = -87.0f; x < 30; x += 0.00037f) {
    const double expected = vsigmoid(static_cast<double>(x));
    EXPECT_LE(std::fabs(static_cast<double>(vsigmoid(x)) - expected), 0x1p-22 * expected) << x;
  }
  EXPECT_EQ(vsigmoid(-kInf), 0.0f);
  EXPECT_EQ(vsigmoid(kInf), 1.0f);
  EXPECT_TRUE(std::isnan(vsigmoid(std::nanf(""))));
}

TEST(VectorMath, SpecialValuesAreExact) {
  EXPECT_EQ(vexp(0.0f), 1.0f);
  EXPECT_EQ(vexp(-kInf), 0.0f);
  EXPECT_EQ(vexp(kInf), kInf);
  EXPECT_EQ(vexp(89.0f), kInf);
  EXPECT_EQ(vexp(-104.0f), 0.0f);
  EXPECT_GT(vexp(-103.0f), 0.0f);
  EXPECT_EQ(vexp2(-kInf), 0.0f);
  EXPECT_EQ(vexp2(kInf), kInf);
  EXPECT_EQ(vexp2(128.0f), kInf);
  for (int n = -149; n < 128; ++n) EXPECT_EQ(vexp2(static_cast<float>(n)), std::ldexp(1.0f, n));
}

TEST(VectorMath, NormalCdfIsAccurateInBothTails) {
  for (float x = -12.9f; x < 13; x += 0.0037f) {
    const float e = vexp(-0.5f * x * x);
    const double expected = normal_cdf(static_cast<double>(x), 0.0);
    // The rounding of x^2 / 2 before the exponential costs (x^2 / 2) 2^-24 relative.
    const double tolerance = 1e-6 + static_cast<double>(x * x) * 0x1p-24;
    EXPECT_LE(std::fabs(static_cast<double>(normal_cdf(x, e)) - expected),
              tolerance * std::min(1.0, expected) + 0x1p-149)
        << x;
  }
}

// The loop below compiles to vector instructions; calls through volatile are scalar.
TEST(VectorMath, VectorLoopsGiveTheBitsOfScalarCalls) {
  std::vector<float> x, exps, exp2s, cdfs;
  for_all_floats([&](float v) { x.push_back(v); });
  exps.resize(x.size());
  exp2s.resize(x.size());
  cdfs.resize(x.size());
  const auto n = static_cast<int64_t>(x.size());
  const float* in = x.data();
  float *e = exps.data(), *e2 = exp2s.data(), *cdf = cdfs.data();
  COHORT_VECTORIZE
  for (int64_t i = 0; i < n; ++i) {
    e[i] = vexp(in[i]);
    e2[i] = vexp2(in[i]);
    cdf[i] = normal_cdf(in[i], e[i]);
  }
  const auto same = [](float a, float b) {
    return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) ||
           (std::isnan(a) && std::isnan(b));
  };
  for (size_t i = 0; i < x.size(); i += 7) {
    volatile float v = x[i];
    volatile float s = vexp(v), s2 = vexp2(v), c = normal_cdf(v, s);
    EXPECT_TRUE(same(s, exps[i]) && same(s2, exp2s[i]) && same(c, cdfs[i])) << x[i];
  }
}

}  // namespace
}  // namespace cohort::kernels
