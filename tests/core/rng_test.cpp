// The generator against published vectors, and the distributions derived from it.
#include "core/rng.h"

#include <map>
#include <set>
#include <vector>

#include "tests/support/test_util.h"

namespace cohort {
namespace {

// Key (k0, k1) = seed, counter (c0, c1) = index, (c2, c3) = stream, low word first.
std::array<uint32_t, 4> philox_words(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  const auto to_u64 = [](uint32_t lo, uint32_t hi) { return uint64_t{hi} << 32 | lo; };
  return philox(to_u64(key[0], key[1]), to_u64(counter[2], counter[3]),
                to_u64(counter[0], counter[1]));
}

}  // namespace

// Known answers for philox4x32-10 from the Random123 distribution (kat_vectors): all zeros, all
// ones, digits of pi.
TEST(Philox, MatchesTheRandom123KnownAnswers) {
  using Words = std::array<uint32_t, 4>;
  EXPECT_EQ(philox_words({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const uint32_t ones = 0xffffffff;
  EXPECT_EQ(philox_words({ones, ones, ones, ones}, {ones, ones}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(
      philox_words({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
      (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, EachPartOfTheAddressMatters) {
  std::set<std::array<uint32_t, 4>> seen;
  for (const uint64_t bit :
       {uint64_t{0}, uint64_t{1}, uint64_t{1} << 31, uint64_t{1} << 32, uint64_t{1} << 63}) {
    seen.insert(philox(bit, 0, 0));
    seen.insert(philox(0, bit, 0));
    seen.insert(philox(0, 0, bit));
  }
  EXPECT_EQ(seen.size(), 13u);  // the three zero addresses are equal
}

TEST(Rng, DrawIIsAddressI) {
  Rng rng(7, 9);
  for (uint64_t i = 0; i < 5; ++i) {
    const auto w = philox(7, 9, i);
    EXPECT_EQ(rng.bits(), uint64_t{w[0]} << 32 | w[1]);
  }
}

TEST(Rng, StreamsOfPurposesAndArgumentsDiffer) {
  std::set<uint64_t> streams;
  int64_t count = 0;
  for (uint64_t purpose = 1; purpose <= 7; ++purpose)
    for (uint64_t a = 0; a < 20; ++a)
      for (uint64_t b = 0; b < 20; ++b, ++count) streams.insert(rng_stream(purpose, a, b));
  EXPECT_EQ(static_cast<int64_t>(streams.size()), count);
}

TEST(Rng, UniformsStayInsideTheirIntervals) {
  EXPECT_EQ(uniform_f32(0), 0.0f);
  EXPECT_LT(uniform_f32(0xffffffff), 1.0f);
  EXPECT_EQ(uniform_f32(0xffffffff), 1.0f - 0x1p-24f);
  EXPECT_GT(uniform_f64(0, 0), 0.0);
  EXPECT_LT(uniform_f64(0xffffffff, 0xffffffff), 1.0);
}

// chi^2 with k - 1 = 6 degrees of freedom exceeds 33 with probability 1e-5; the draws are fixed, so
// the test is deterministic.
TEST(Rng, BelowIsUniform) {
  constexpr int64_t kValues = 7, kDraws = 70000;
  Rng rng(1, rng_stream(kTestPurpose));
  std::vector<int64_t> counts(kValues, 0);
  for (int64_t i = 0; i < kDraws; ++i) {
    const int64_t v = rng.below(kValues);
    ASSERT_TRUE(v >= 0 && v < kValues);
    ++counts[static_cast<size_t>(v)];
  }
  double chi2 = 0;
  const double expected = static_cast<double>(kDraws) / kValues;
  for (const int64_t c : counts)
    chi2 += (static_cast<double>(c) - expected) * (static_cast<double>(c) - expected) / expected;
  EXPECT_LT(chi2, 33);
}

TEST(Rng, BelowReachesBothEndsOfLargeRanges) {
  Rng rng(2, 0);
  const int64_t n = int64_t{1} << 62;
  int64_t low = n, high = 0;
  for (int i = 0; i < 1000; ++i) {
    const int64_t v = rng.below(n);
    low = std::min(low, v);
    high = std::max(high, v);
  }
  EXPECT_LT(low, n / 100);
  EXPECT_GT(high, n - n / 100);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(rng.below(1), 0);
}

TEST(Rng, BetweenIncludesBothEnds) {
  Rng rng(3, 0);
  std::map<int64_t, int> seen;
  for (int i = 0; i < 300; ++i) ++seen[rng.between(-1, 1)];
  EXPECT_EQ(seen.size(), 3u);
  EXPECT_EQ(seen.begin()->first, -1);
  EXPECT_EQ(seen.rbegin()->first, 1);
}

// For n standard normals the standard deviations of the mean, the mean square and the mean fourth
// power are 1 / sqrt(n), sqrt(2 / n) and sqrt(96 / n); the tolerance is five of them.
TEST(Rng, NormalsHaveTheirMoments) {
  constexpr int kDraws = 20000;
  Rng rng(4, rng_stream(kTestPurpose));
  double m1 = 0, m2 = 0, m4 = 0, cross = 0;
  for (int i = 0; i < kDraws; ++i) {
    const auto [a, b] = normal_pair(5, 6, static_cast<uint64_t>(i));
    cross += a * b / kDraws;
    const double v = rng.normal();
    m1 += v / kDraws;
    m2 += v * v / kDraws;
    m4 += v * v * v * v / kDraws;
  }
  EXPECT_NEAR(m1, 0, 5 / std::sqrt(kDraws));
  EXPECT_NEAR(m2, 1, 5 * std::sqrt(2.0 / kDraws));
  EXPECT_NEAR(m4, 3, 5 * std::sqrt(96.0 / kDraws));
  EXPECT_NEAR(cross, 0, 5 / std::sqrt(kDraws));
}

}  // namespace cohort
