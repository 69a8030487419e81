// Returns of the turns of a dialogue, and advantages relative to other baselines than the group.
// The expected numbers are computed by hand.
#include <gtest/gtest.h>

#include <cmath>

#include "rl/group.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

using D = std::vector<double>;
constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

// A dialogue with turns of two tokens after a prompt of one, and its rewards by `names` below.
ScoredCompletion dialogue(const D& turn_rewards, size_t turns, double environment, double math) {
  ScoredCompletion c;
  c.append_observed(1);
  for (size_t k = 0; k < turns; ++k) {
    if (k > 0) c.append_observed(9);
    c.append_sampled(3, -1);
    c.append_sampled(4, -1);
  }
  c.prompt_length = 1;
  c.turn_rewards = turn_rewards;
  c.rewards = {math, environment};
  c.reward = weighted_sum(D{2, 0.5}, c.rewards);
  return c;
}
D returns_of(const ScoredCompletion& c, double discount) {
  return turn_returns(c, std::vector<std::string>{"math", "environment"}, D{2, 0.5}, discount);
}

TEST(Credit, TurnLengthsAreThoseOfTheSpansOfSampledTokens) {
  ScoredCompletion c = dialogue({}, 3, kNone, 1);
  EXPECT_EQ(c.turn_lengths(), (std::vector<int64_t>{2, 2, 2}));
  c.append_sampled(5, -1);
  EXPECT_EQ(c.turn_lengths(), (std::vector<int64_t>{2, 2, 3}));
  EXPECT_EQ(c.num_turns(), 3);
  EXPECT_EQ(Trajectory().num_turns(), 0);
}

// 0.5 (4 + d 8), and 2 * 3 with the last turn.
TEST(Credit, ReturnsDiscountLaterTurns) {
  const ScoredCompletion c = dialogue({4, 8}, 2, 12, 3);
  EXPECT_EQ(returns_of(c, 1), (D{12, 10}));
  EXPECT_EQ(returns_of(c, 0.5), (D{7, 10}));
  EXPECT_EQ(returns_of(c, 0), (D{2, 10}));
  EXPECT_EQ(returns_of(dialogue({4, 8}, 2, 12, kNone), 0.5), (D{4, 4}));  // math does not apply
}

// A return that is rounding is 0, as a sum of rewards is: 0.1 + 0.2 - 0.3.
TEST(Credit, RoundingIsNoReturn) {
  ScoredCompletion c = dialogue({-0.3}, 1, -0.3, 0.1);
  c.rewards.push_back(0.2);
  c.reward = 0;
  const D found =
      turn_returns(c, std::vector<std::string>{"math", "environment", "format"}, D{1, 1, 1}, 1);
  EXPECT_EQ(found, (D{0}));
}

// A turn without a reward counts 0; the last one may have had no reply at all.
TEST(Credit, TurnsWithoutARewardCountZero) {
  EXPECT_EQ(returns_of(dialogue({kNone, 8}, 3, 4, 1), 0.5), (D{2.5, 5, 2}));
  EXPECT_EQ(returns_of(dialogue({}, 1, 0, 1), 0.5), (D{2}));
}

TEST(Credit, ADialogueWithoutARewardHasNone) {
  const D all = returns_of(dialogue({4, 8}, 2, kNone, kNone), 1);
  ASSERT_EQ(all.size(), 2u);
  for (const double r : all) EXPECT_TRUE(std::isnan(r));
}

// Three dialogues of two turns with the rewards (0, 1), (1, 0) and (0, 0): the columns of their
// returns, one per turn, are compared each with itself.
TEST(Credit, TurnsAreComparedWithThatTurnOfTheOthers) {
  const D first{1, 1, 0}, second{1, 0, 0};
  const auto expect = [](const D& values, AdvantageScale scale, const D& expected) {
    const D found = group_advantages(values, 3, scale);
    for (size_t i = 0; i < 3; ++i) EXPECT_NEAR(found[i], expected[i], 5e-9) << i;
  };
  expect(first, AdvantageScale::kNone, {1 / 3.0, 1 / 3.0, -2 / 3.0});
  expect(second, AdvantageScale::kNone, {2 / 3.0, -1 / 3.0, -1 / 3.0});
  expect(first, AdvantageScale::kGroup, {0.57725029, 0.57725029, -1.15450057});
  expect(second, AdvantageScale::kGroup, {1.15450057, -0.57725029, -0.57725029});
}

// With baseline: batch the step is one group: r = (1, 0, 0, 0.5).
TEST(Credit, TheStepAsOneGroup) {
  const D r{1, 0, 0, 0.5};
  EXPECT_EQ(group_advantages(r, 4, AdvantageScale::kNone), (D{0.625, -0.375, -0.375, 0.125}));
  const D expected{1.30530975, -0.78318585, -0.78318585, 0.26106195};
  for (const AdvantageScale scale : {AdvantageScale::kGroup, AdvantageScale::kBatch}) {
    const D scaled = group_advantages(r, 4, scale, reward_std(r));
    for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(scaled[i], expected[i], 5e-9) << i;
  }
}

}  // namespace
}  // namespace cohort
