// Advantages: properties of every scale, and closed forms for binary rewards.
#include "rl/advantage.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/rng.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

constexpr double kNoReward = std::numeric_limits<double>::quiet_NaN();

std::vector<double> random_rewards(uint64_t seed, size_t n) {
  Rng rng(seed, rng_stream(kTestPurpose));
  std::vector<double> rewards(n);
  for (double& r : rewards) r = rng.normal();
  return rewards;
}

std::vector<double> of(const std::vector<double>& rewards, AdvantageScale scale) {
  return group_advantages(rewards, static_cast<int64_t>(rewards.size()), scale,
                          reward_std(rewards));
}

TEST(Advantage, SumsToZeroInEveryGroup) {
  const int64_t size = 8, groups = 50;
  for (const auto& [scale, name, factor] : kAdvantageScales) {
    auto rewards = random_rewards(1, static_cast<size_t>(size * groups));
    for (size_t i = 0; i < rewards.size(); i += 5) rewards[i] = kNoReward;
    const auto advantages = group_advantages(rewards, size, scale, reward_std(rewards));
    for (size_t g = 0; g < static_cast<size_t>(groups); ++g) {
      double sum = 0;
      for (size_t i = g * size; i < (g + 1) * size; ++i) sum += advantages[i];
      EXPECT_NEAR(sum, 0, 1e-12);  // 8 terms near 1, each rounded to 1e-16 a few times
    }
  }
}

TEST(Advantage, EqualRewardsGiveExactZeros) {
  // The mean of ten values 0.1 + 0.2 differs from them in the last bit: with a std floor far below
  // that difference the advantage would be +-1.
  for (const double r : {0.0, 1.0, -3.5, 0.1 + 0.2, 1e300, 5e-324})
    for (const size_t n : {1u, 2u, 7u, 10u})
      for (const auto& [scale, name, factor] : kAdvantageScales)
        for (const double a : of(std::vector<double>(n, r), scale)) EXPECT_EQ(a, 0.0) << r;
}

// 0.3 and 0.1 + 0.2 are equal rewards; a relative difference of 1e-8 is not.
TEST(Advantage, RewardsThatDifferByRoundingAreEqual) {
  for (const auto& [scale, name, factor] : kAdvantageScales) {
    for (const double unit : {1.0, -1.0, 1e-6, 1e12}) {
      const std::vector<double> rounded = {0.3 * unit, (0.1 + 0.2) * unit, 0.3 * unit};
      ASSERT_NE(rounded[0], rounded[1]);
      EXPECT_EQ(group_advantages(rounded, 3, scale, 1), std::vector<double>(3, 0.0));
      const std::vector<double> differ = {unit, unit * (1 + 1e-8), unit};
      EXPECT_NE(group_advantages(differ, 3, scale, 1), std::vector<double>(3, 0.0));
    }
  }
}

// 0.1 k as sums of other terms in other orders: all are 0.1 k, up to some roundings of the largest
// partial sum, which may be far larger than the total, as for k = 0.
double tenths(int k, Rng& rng) {
  std::vector<double> terms;
  for (int i = 0; i < 6; ++i) {
    const double term = 0.1 * static_cast<double>(rng.below(9));
    terms.insert(terms.end(), {term, -term});
  }
  for (int i = 0; i < k; ++i) terms.push_back(0.1);
  double sum = 0;
  while (!terms.empty()) {
    std::swap(terms[static_cast<size_t>(rng.below(static_cast<int64_t>(terms.size())))],
              terms.back());
    sum += terms.back();
    terms.pop_back();
  }
  return sum;
}

TEST(Advantage, SumsInOtherOrdersAreEqualRewards) {
  Rng rng(6, rng_stream(kTestPurpose));
  for (int trial = 0; trial < 500; ++trial) {
    std::vector<double> equal(8), values(8);
    for (double& r : equal) r = tenths(trial % 6, rng);
    for (double& r : values) r = tenths(static_cast<int>(rng.below(4)), rng);
    values[0] = 0.7;
    EXPECT_EQ(reward_std(equal), 0);
    for (const auto& [scale, name, factor] : kAdvantageScales) {
      EXPECT_EQ(of(equal, scale), std::vector<double>(8, 0.0)) << name;
      auto advantages = group_advantages(equal, 8, scale, 1e-3);
      const auto others = of(values, scale);
      advantages.insert(advantages.end(), others.begin(), others.end());
      // Through every later stage: advantages of exactly 0 stay so.
      auto standardized = advantages, whitened = advantages;
      standardize(standardized, std::vector<double>(16, 1.0));
      whiten_advantages(whitened, std::vector<double>(16, 3.0));
      for (size_t i = 0; i < 16; ++i) {
        EXPECT_EQ(standardized[i] == 0, advantages[i] == 0) << name << advantages[i];
        EXPECT_EQ(whitened[i] == 0, advantages[i] == 0) << name << advantages[i];
      }
      EXPECT_TRUE(std::all_of(standardized.begin(), standardized.begin() + 8,
                              [](double a) { return a == 0; }));
      EXPECT_NE(standardized[8], 0);
    }
  }
}

TEST(Advantage, ARewardThatIsTheMeanHasNone) {
  for (const auto& [scale, name, factor] : kAdvantageScales) {
    const auto advantages = of({0.1, 0.2, 0.3}, scale);  // the mean is 0.2 + 3e-17
    EXPECT_EQ(advantages[1], 0) << name;
    EXPECT_GT(advantages[2], 0.09) << name;
  }
}

TEST(Advantage, WeightedSumsThatCancelAreZero) {
  const std::vector<double> weights = {0.1, 0.2, -0.3, 1e6};
  const auto sum = [&](const std::vector<double>& values) { return weighted_sum(weights, values); };
  EXPECT_EQ(sum({1, 1, 1, kNoReward}), 0);
  EXPECT_NEAR(sum({3, 1, 1, 0}), 0.2, 1e-15);
  EXPECT_TRUE(std::isnan(sum({kNoReward, kNoReward, kNoReward, kNoReward})));
}

TEST(Advantage, StandardizingLeavesMeanZeroAndAUnitDeviation) {
  std::vector<double> a = {1, 2, 7, 5};
  standardize(a, std::vector<double>{1, 2, kNoReward, 3});
  const double std = std::sqrt(13.0 / 3);
  EXPECT_NEAR(a[0], (1 - 8.0 / 3) / (std + 1e-4), 1e-15);
  EXPECT_NEAR(a[3], (5 - 8.0 / 3) / (std + 1e-4), 1e-15);
  EXPECT_EQ(a[2], 0);
  std::vector<double> equal = {0.3, 0.1 + 0.2, 0.3};
  standardize(equal, std::vector<double>{1, 2, 3});
  EXPECT_EQ(equal, std::vector<double>(3, 0));
  std::vector<double> one = {3};
  standardize(one, std::vector<double>{1});
  EXPECT_EQ(one[0], 0);
}

TEST(Advantage, QuantilesAreInterpolated) {
  EXPECT_EQ(quantile({4, 1, 3, 2}, 0), 1);
  EXPECT_EQ(quantile({4, 1, 3, 2}, 1), 4);
  EXPECT_DOUBLE_EQ(quantile({4, 1, 3, 2}, 0.5), 2.5);
  EXPECT_DOUBLE_EQ(quantile({10, 0}, 0.3), 3);
  EXPECT_EQ(quantile({5}, 0.9), 5);
  EXPECT_EQ(quantile({}, 0.5), -HUGE_VAL);
}

TEST(Advantage, PermutingAGroupPermutesTheResultExactly) {
  Rng rng(2, rng_stream(kTestPurpose));
  for (const auto& [scale, name, factor] : kAdvantageScales) {
    auto rewards = random_rewards(3, 9);
    rewards[4] = kNoReward;
    const auto advantages = of(rewards, scale);
    for (int trial = 0; trial < 20; ++trial) {
      std::vector<size_t> order(rewards.size());
      for (size_t i = 0; i < order.size(); ++i) order[i] = i;
      for (size_t i = order.size() - 1; i > 0; --i)
        std::swap(order[i], order[static_cast<size_t>(rng.below(static_cast<int64_t>(i) + 1))]);
      std::vector<double> permuted;
      for (const size_t i : order) permuted.push_back(rewards[i]);
      const auto result = of(permuted, scale);
      for (size_t i = 0; i < order.size(); ++i) EXPECT_EQ(result[i], advantages[order[i]]);
    }
  }
}

// `batch` couples them only through batch_std.
TEST(Advantage, GroupsAreIndependent) {
  const auto both = random_rewards(4, 12);
  for (const auto& [scale, name, factor] : kAdvantageScales) {
    const auto alone = [&](size_t begin) {
      return group_advantages(std::span(both).subspan(begin, 6), 6, scale, reward_std(both));
    };
    const auto advantages = group_advantages(both, 6, scale, reward_std(both));
    const auto first = alone(0), second = alone(6);
    EXPECT_TRUE(std::equal(first.begin(), first.end(), advantages.begin()));
    EXPECT_TRUE(std::equal(second.begin(), second.end(), advantages.begin() + 6));
  }
}

TEST(Advantage, NaNIsLeftOutOfTheStatisticsAndGetsZero) {
  for (const auto& [scale, name, factor] : kAdvantageScales) {
    const auto with = of({1, kNoReward, 2, 5, kNoReward}, scale), without = of({1, 2, 5}, scale);
    EXPECT_EQ(with, (std::vector<double>{without[0], 0, without[1], without[2], 0}));
    EXPECT_EQ(of({kNoReward, kNoReward}, scale), (std::vector<double>{0, 0}));
    EXPECT_EQ(of({kNoReward, 3}, scale), (std::vector<double>{0, 0}));  // nothing to compare with
  }
}

TEST(Advantage, LeaveOneOutSubtractsTheMeanOfTheOthers) {
  const auto rewards = random_rewards(5, 6);
  const auto advantages = of(rewards, AdvantageScale::kLeaveOneOut);
  for (size_t i = 0; i < rewards.size(); ++i) {
    double others = 0;
    for (size_t j = 0; j < rewards.size(); ++j) others += j == i ? 0 : rewards[j] / 5;
    EXPECT_NEAR(advantages[i], rewards[i] - others, 1e-14);
  }
}

// With c of n rewards 1 and p = c / n: std^2 = n p (1 - p) / (n - 1).
TEST(Advantage, BinaryRewardsFollowTheClosedForm) {
  for (const int n : {2, 4, 8, 16})
    for (int c = 1; c < n; ++c) {
      std::vector<double> rewards(static_cast<size_t>(n), 0.0);
      std::fill_n(rewards.begin(), c, 1.0);
      const double p = static_cast<double>(c) / n;
      const double std = std::sqrt(n * p * (1 - p) / (n - 1));
      const auto scaled = of(rewards, AdvantageScale::kGroup);
      EXPECT_NEAR(scaled.front(), (1 - p) / (std + 1e-4), 1e-14);
      EXPECT_NEAR(scaled.back(), -p / (std + 1e-4), 1e-14);
      const auto centred = of(rewards, AdvantageScale::kNone);
      EXPECT_NEAR(centred.front(), 1 - p, 1e-15);
      EXPECT_NEAR(centred.back(), -p, 1e-15);
    }
}

TEST(Advantage, RejectsAGroupSizeThatDoesNotDivide) {
  const std::vector<double> rewards(5, 1.0);
  EXPECT_THROW_WITH(group_advantages(rewards, 2, AdvantageScale::kNone), Error, "groups of 2");
  EXPECT_THROW_WITH(group_advantages(rewards, 0, AdvantageScale::kNone), Error, "groups of 0");
}

// Two groups of two: means 1 and 4, and squares 1 + 1 + 4 + 4 about them, but the std is that of
// all four rewards 0, 2, 2, 6 about 2.5: sqrt((6.25 + 0.25 + 0.25 + 12.25) / 3).
TEST(Advantage, BatchDividesByTheDeviationOfAllRewards) {
  const std::vector<double> rewards = {0, 2, kNoReward, 2, 6, kNoReward};
  EXPECT_DOUBLE_EQ(reward_std(rewards), std::sqrt(19.0 / 3));
  const auto advantages = group_advantages(rewards, 3, AdvantageScale::kBatch, reward_std(rewards));
  const double unit = 1 / (std::sqrt(19.0 / 3) + 1e-4);
  const double expected[] = {-unit, unit, 0, -2 * unit, 2 * unit, 0};
  for (size_t i = 0; i < rewards.size(); ++i) EXPECT_NEAR(advantages[i], expected[i], 1e-15) << i;
  EXPECT_EQ(reward_std(std::vector<double>{3}), 0);
  EXPECT_EQ(reward_std(std::vector<double>{kNoReward, kNoReward}), 0);
}

// Means 0.5 and -2: (r - mean) / |mean|.
TEST(Advantage, MaxRlDividesByTheSizeOfTheMean) {
  const std::vector<double> rewards = {1, 0, 0, 1, -1, -3, kNoReward, -2, -1, 1, 0, 0};
  const auto advantages = group_advantages(rewards, 4, AdvantageScale::kMaxRl);
  const double expected[] = {1, -1, -1, 1, 0.5, -0.5, 0, 0, 0, 0, 0, 0};
  for (size_t i = 0; i < rewards.size(); ++i) EXPECT_NEAR(advantages[i], expected[i], 1e-15) << i;
}

// The means are 9e-18, 0 and -1e-17 in place of 0: (r - mean) / |mean| would be 1e16. A small mean
// that is no rounding still divides.
TEST(Advantage, MaxRlTakesAMeanOfRoundingAsZero) {
  for (const std::vector<double>& rewards : {std::vector<double>{0.1, 0.2, -0.3},
                                             {0.1, 0.7, -0.8, 0},
                                             {-0.1, -0.2, 0.3},
                                             {1e6 / 3, 2e6 / 3, -1e6},
                                             {1e-8 / 3, 2e-8 / 3, -1e-8}})
    EXPECT_EQ(of(rewards, AdvantageScale::kMaxRl), std::vector<double>(rewards.size(), 0.0));
  EXPECT_NEAR(of({1, -1, 3e-6}, AdvantageScale::kMaxRl)[0], 1e6, 2);
}

// Values 2, -1, -1 of 1, 2 and 3 tokens: mean -0.5, squares 6.25 + 6 * 0.25 - 0.25 = 7.5 over 5.
TEST(Advantage, WhiteningCountsASampleOncePerToken) {
  std::vector<double> advantages = {2, -1, 7, -1};
  whiten_advantages(advantages, std::vector<double>{1, 2, 0, 3});
  const double unit = 1 / std::sqrt(1.5 + 1e-8);
  const double expected[] = {2.5 * unit, -0.5 * unit, 7, -0.5 * unit};
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(advantages[i], expected[i], 1e-14) << i;
}

TEST(Advantage, WhiteningLeavesWhatHasNoVariance) {
  for (const std::vector<double>& values :
       {std::vector<double>{}, {3}, {0, 0, 0}, {0.1 + 0.2, 0.3, 0.3}}) {
    std::vector<double> advantages = values;
    whiten_advantages(advantages, std::vector<double>(values.size(), 1.0));
    EXPECT_EQ(advantages, values);
    whiten_advantages(advantages, std::vector<double>(values.size(), 0.0));
    EXPECT_EQ(advantages, values);
  }
}

}  // namespace
}  // namespace cohort
