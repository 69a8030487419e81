// The countdown checker: exact values, every number once, and text made to break it.
#include "data/tasks/countdown.h"

#include <algorithm>

#include "data/example.h"
#include "tests/support/test_util.h"
#include "text/json.h"

namespace cohort {
namespace {

using Numbers = std::vector<int64_t>;

bool solved(const Numbers& numbers, int64_t target, std::string_view expression) {
  return countdown_solved(numbers, target, expression);
}

TEST(Countdown, FollowsPrecedenceAndAssociativity) {
  EXPECT_TRUE(solved({2, 3, 4}, 14, "2+3*4"));
  EXPECT_TRUE(solved({2, 3, 4}, 20, "(2+3)*4"));
  EXPECT_TRUE(solved({10, 3, 2}, 5, "10-3-2"));
  EXPECT_TRUE(solved({10, 3, 2}, 9, "10-(3-2)"));
  EXPECT_TRUE(solved({24, 4, 3}, 2, "24/4/3"));
  EXPECT_TRUE(solved({24, 4, 3}, 18, " 24 / 4 * 3 "));
  EXPECT_TRUE(solved({5}, 5, "((5))"));
  EXPECT_TRUE(solved({0, 7}, 7, "7+0"));
  EXPECT_FALSE(solved({10, 3, 2}, 9, "10-3-2"));
}

TEST(Countdown, DivisionIsExact) {
  EXPECT_TRUE(solved({1, 3, 3}, 1, "1/3*3"));
  EXPECT_TRUE(solved({51, 33, 75, 48}, 64, "(75-(33/(51-48)))"));
  EXPECT_TRUE(solved({3, 3, 7, 7}, 24, "7*(3+3/7)"));
  EXPECT_FALSE(solved({7, 2}, 3, "7/2"));
  EXPECT_FALSE(solved({7, 2}, 7, "7/2"));
  EXPECT_FALSE(solved({3, 5, 4}, -2, "(3-5)/4*4"));      // 4 used twice
  EXPECT_TRUE(solved({3, 5, 4, 4}, -2, "4/(4/(3-5))"));  // negative divisor
}

TEST(Countdown, UsesEveryNumberExactlyOnce) {
  EXPECT_FALSE(solved({2, 3}, 5, "2+2+1"));
  EXPECT_FALSE(solved({2, 3}, 2, "2"));
  EXPECT_FALSE(solved({2, 3}, 7, "2+2+3"));
  EXPECT_TRUE(solved({2, 2, 3}, 7, "2+3+2"));
  EXPECT_FALSE(solved({2, 2, 3}, 8, "2+3+3"));
  EXPECT_FALSE(solved({2, 3}, 23, "23"));
  EXPECT_FALSE(solved({}, 0, ""));
}

TEST(Countdown, RejectsHostileAndMalformedText) {
  const Numbers numbers = {1, 2};
  for (const char* text : {"",
                           " ",
                           "1/0",
                           "1+",
                           "+1+2",
                           "-1+4",
                           "1+-2",
                           "1 2",
                           "1(2)",
                           "(1)(2)",
                           "()",
                           "(1+2",
                           "1+2)",
                           "1+2=3",
                           "1+2;",
                           "1+2\n",
                           "1+\t2",
                           "1**2",
                           "1//2",
                           "01+2",
                           "1.0+2",
                           "1e0+2",
                           "0x1+2",
                           "1,2",
                           "1+2 3",
                           "_1+2",
                           "1+2\xff",
                           "１+2",
                           "1+2#",
                           "1 + 2 # 3",
                           "1/(2-2)",
                           "(1+2",
                           "9223372036854775808+1",
                           "99999999999999999999999999999999999999"})
    EXPECT_FALSE(solved(numbers, 3, text)) << text;
  EXPECT_TRUE(solved(numbers, 3, "1+2"));
  EXPECT_FALSE(solved(numbers, 3, std::string_view("1+2\0", 4)));
  EXPECT_FALSE(solved({0, 0, 1}, 1, "0/0+1"));
  EXPECT_FALSE(solved({-1, 4}, 3, "-1+4"));
  EXPECT_FALSE(solved({1, -2}, 3, "1--2"));
}

TEST(Countdown, LimitsDepthAndLength) {
  const auto wrapped = [](size_t depth) {
    return std::string(depth, '(') + "7" + std::string(depth, ')');
  };
  EXPECT_TRUE(solved({7}, 7, wrapped(64)));
  EXPECT_FALSE(solved({7}, 7, wrapped(65)));
  EXPECT_FALSE(solved({7}, 7, std::string(1'000'000, '(')));
  EXPECT_TRUE(solved({7}, 7, str("7", std::string(1023, ' '))));
  EXPECT_FALSE(solved({7}, 7, str("7", std::string(1024, ' '))));
}

TEST(Countdown, RejectsValuesThatOverflow) {
  const int64_t big = INT64_MAX;
  const std::string b = std::to_string(big);
  EXPECT_TRUE(solved({big}, big, b));
  EXPECT_FALSE(solved({big, 1}, INT64_MIN, b + "+1"));
  EXPECT_FALSE(solved({big, 2}, -2, b + "*2"));
  EXPECT_FALSE(solved({0, big, 1}, INT64_MIN, "0-" + b + "-1"));
  EXPECT_FALSE(solved({1, 1, big, big}, 0, "1/" + b + "-1/" + b));  // common denominator
  EXPECT_TRUE(solved({1, 1, big}, big, "1/(1/" + b + ")"));
}

TEST(Countdown, GeneratedNumbersAreSmallAndTargetsPositive) {
  const auto set =
      make_task_set(find_task("countdown"), {.min_size = 3, .max_size = 4}, Split::kTrain, 1, 0);
  for (int64_t i = 0; i < 500; ++i) {
    const Example e = set->get(i);
    const auto& numbers = e.fields.at("numbers").as_array();
    EXPECT_TRUE(numbers.size() == 3 || numbers.size() == 4);
    std::string prompt;
    for (const Json& n : numbers) {
      EXPECT_GE(n.as_int(), 1);
      EXPECT_LE(n.as_int(), 99);
      prompt += n.to_text() + " ";
    }
    const int64_t target = e.fields.at("target").as_int();
    EXPECT_GE(target, 1);
    EXPECT_LE(target, 999);
    EXPECT_EQ(e.prompt, str(prompt, "-> ", target, "\n"));
    EXPECT_EQ(e.answer, std::to_string(target));
  }
}

TEST(Countdown, RealProblemsAreSolvedByTheirSolutions) {
  COHORT_REQUIRE_DATA(dir);
  JsonlConfig config{.path = {dir + "/countdown/train.jsonl"},
                     .prompt = "{numbers} -> {target}\n",
                     .answer = "{target}",
                     .solution = "{solution}"};
  int64_t count = 0;
  const auto [train, held_out, sizes] = load_jsonl(config);
  for (const ExampleSet* set : {train.get(), held_out.get()})
    for (int64_t i = 0; i < set->size(); ++i, ++count) {
      const Example e = set->get(i);
      Numbers numbers;
      for (const Json& n : e.fields.at("numbers").as_array()) numbers.push_back(n.as_int());
      const int64_t target = e.fields.at("target").as_int();
      ASSERT_TRUE(solved(numbers, target, e.solution)) << e.prompt << e.solution;
      ASSERT_FALSE(solved(numbers, target + 1, e.solution));
      ++numbers[0];
      ASSERT_FALSE(solved(numbers, target, e.solution));
    }
  EXPECT_EQ(count, 2000);
}

}  // namespace
}  // namespace cohort
