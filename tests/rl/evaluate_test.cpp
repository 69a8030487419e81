// Pass rates against enumeration, majorities by hand.
#include "rl/evaluate.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "rl/reward.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

// Fraction of the k-subsets of n samples that contain one of the first c.
double by_enumeration(int n, int c, int k) {
  int64_t subsets = 0, passing = 0;
  for (uint32_t set = 0; set < (1u << n); ++set) {
    if (std::popcount(set) != k) continue;
    ++subsets;
    passing += (set & ((1u << c) - 1)) != 0;
  }
  return static_cast<double>(passing) / static_cast<double>(subsets);
}

TEST(PassAtK, EqualsEnumerationOverSubsets) {
  for (int n = 1; n <= 9; ++n)
    for (int c = 0; c <= n; ++c)
      for (int k = 1; k <= n; ++k)
        EXPECT_NEAR(pass_at_k(n, c, k), by_enumeration(n, c, k), 1e-14)
            << n << " " << c << " " << k;
}

TEST(PassAtK, IsExactAtTheEnds) {
  EXPECT_EQ(pass_at_k(1000, 0, 1000), 0.0);
  EXPECT_EQ(pass_at_k(1000, 1, 1000), 1.0);
  EXPECT_EQ(pass_at_k(8, 8, 1), 1.0);
  // C(10000, 5000) overflows a double; the quotient is 2^-k and a little less.
  EXPECT_GT(pass_at_k(20000, 10000, 5000), 1 - 1e-15);
}

TEST(PassAtK, RejectsImpossibleCounts) {
  EXPECT_THROW_WITH(pass_at_k(4, 2, 0), Error, "k from 1 to n = 4, got 0");
  EXPECT_THROW_WITH(pass_at_k(4, 2, 5), Error, "got 5");
  EXPECT_THROW_WITH(pass_at_k(4, 5, 1), Error, "c from 0 to n = 4, got 5");
  EXPECT_THROW_WITH(pass_at_k(4, -1, 1), Error, "got -1");
}

double mean_pass_at_k(std::span<const double> correct, int64_t num_generations, int64_t k) {
  return mean_score(pass_at_k_of_prompts(correct, num_generations, k)).mean;
}

TEST(PassAtK, MeanRunsOverPrompts) {
  const std::vector<double> correct = {1, 0, 0, 0, /**/ 1, 1, 0, 0, /**/ 0, 0, 0, 0};
  EXPECT_NEAR(mean_pass_at_k(correct, 4, 1), (0.25 + 0.5 + 0) / 3, 1e-15);
  EXPECT_NEAR(mean_pass_at_k(correct, 4, 2), (0.5 + 5.0 / 6 + 0) / 3, 1e-15);
  EXPECT_THROW_WITH(mean_pass_at_k(correct, 5, 1), Error, "groups of 5");
  EXPECT_THROW_WITH(mean_pass_at_k({}, 4, 1), Error, "got 0 values");
}

TEST(PassAtK, LeavesOutSamplesThatAreNotJudged) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  // 1 of 3, 1 of 1, none judged, 0 of 4.
  const std::vector<double> correct = {1,   0,   0,   nan, /**/ nan, nan, 1, nan,
                                       nan, nan, nan, nan, /**/ 0,   0,   0, 0};
  EXPECT_NEAR(mean_pass_at_k(correct, 4, 1), (1.0 / 3 + 1 + 0) / 3, 1e-15);
  EXPECT_NEAR(mean_pass_at_k(correct, 4, 2), (2.0 / 3 + 0) / 2,
              1e-15);  // the second prompt has too few
  EXPECT_NEAR(mean_pass_at_k(correct, 4, 4), 0, 1e-15);
  EXPECT_TRUE(std::isnan(mean_pass_at_k(std::vector<double>{nan, nan}, 1, 1)));
}

TEST(MeanScores, HaveTheStandardErrorOfTheMean) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const MeanScore score = mean_score(std::vector<double>{0.25, nan, 0.75, 0.5});
  EXPECT_DOUBLE_EQ(score.mean, 0.5);
  EXPECT_DOUBLE_EQ(score.error, std::sqrt(0.125 / (3 * 2)));
  // For verdicts it is sqrt(p (1 - p) / (n - 1)).
  EXPECT_DOUBLE_EQ(mean_score(std::vector<double>{1, 0, 0, 0, 0}).error, std::sqrt(0.2 * 0.8 / 4));
  EXPECT_TRUE(std::isnan(mean_score({}).mean));
  // Half the width of the Wilson interval at z = 1, where the formula gives 0.
  for (const double p : {0.0, 1.0})
    for (const double n : {2.0, 8.0, 500.0}) {
      const double z = 1,
                   wilson = z / (1 + z * z / n) * std::sqrt(p * (1 - p) / n + z * z / (4 * n * n));
      std::vector<double> values(static_cast<size_t>(n), p);
      EXPECT_DOUBLE_EQ(mean_score(values).error, wilson);
      values.push_back(nan);
      EXPECT_DOUBLE_EQ(mean_score(values).error, wilson);
    }
  EXPECT_EQ(mean_score(std::vector<double>{0.5, 0.5}).error, 0);
  EXPECT_EQ(mean_score(std::vector<double>{1}).mean, 1);
  EXPECT_TRUE(std::isnan(mean_score(std::vector<double>{1}).error));
}

TEST(MajorityAtK, IsTheVerdictOnTheMostFrequentAnswer) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<std::string> answers = {"7", "8", "8", "9", "7", "7"};
  const std::vector<double> right_7 = {1, 0, 0, 0, 1, 1}, right_8 = {0, 1, 1, 0, 0, 0};
  // The first 1, 2 (a tie: the first), 3, 4, 5 (a tie of two and two: 7 occurs first), 6.
  const double expected[] = {1, 1, 0, 0, 1, 1};
  for (int64_t k = 1; k <= 6; ++k) {
    EXPECT_EQ(majority_at_k(answers, right_7, k), expected[k - 1]) << k;
    EXPECT_EQ(majority_at_k(answers, right_8, k), 1 - expected[k - 1]) << k;
  }
  // Samples that are not judged have no vote: of the first 3 judged ones two are 8.
  const std::vector<double> some = {nan, 0, 0, 0, 1, nan};
  EXPECT_EQ(majority_at_k(answers, some, 3), 0);
  EXPECT_EQ(majority_at_k(answers, some, 4), 0);
  EXPECT_TRUE(std::isnan(majority_at_k(answers, some, 5)));
  EXPECT_THROW_WITH(majority_at_k(answers, some, 0), Error, "positive k");
}

TEST(MajorityAtK, AnswersAreWhatTheRewardFinds) {
  const auto answer = [](const RewardConfig& config, const char* completion) {
    return make_answer(config)(completion);
  };
  EXPECT_EQ(answer({.name = "math"}, "so it is \\boxed{1,200}. Or not"), "1200");
  EXPECT_EQ(answer({.name = "numeric", .pattern = "= (\\S+)"}, "a = 3\nb = $1,200 now"), "1200");
  EXPECT_EQ(answer({.name = "exact_match", .pattern = "<a>(.*)</a>"}, "x <a> 5 </a>"), "5");
  // Without an answer it is the completion.
  EXPECT_EQ(answer({.name = "numeric", .pattern = "= (\\S+)"}, " no idea\n"), "no idea");
  EXPECT_EQ(answer({.name = "exact_match"}, " 5 apples\n"), "5 apples");
  EXPECT_EQ(answer({.name = "format", .pattern = "(5) .*"}, "5 apples"), "5 apples");
  EXPECT_EQ(answer({.name = "command", .program = {.run = "judge"}}, "5 "), "5");
}

}  // namespace
}  // namespace cohort
