// Rewards of sampled tokens: by their number, and by their repetition.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "rl/reward.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

// The value of a reward for `length` tokens, in a run with max_completion_length `max`.
double value_of(const RewardConfig& config, int64_t length, int64_t max = 20) {
  const Example example;
  RewardInput in{example, "text"};
  in.tokens.emplace(static_cast<size_t>(length), 1);
  in.max_tokens = max;
  return make_reward(config, nullptr)(in);
}

double repetition_of(const RewardConfig& config, const std::vector<int32_t>& tokens) {
  const Example example;
  RewardInput in{example, ""};
  in.tokens = tokens;
  return make_reward(config, nullptr)(in);
}

// Completions of one prompt: lengths in sampled tokens, after a prompt of two.
std::vector<Trajectory> completions(const std::vector<std::pair<std::string, int64_t>>& list) {
  std::vector<Trajectory> out;
  for (const auto& [text, length] : list) {
    Trajectory& t = out.emplace_back();
    t.tokens = {8, 9};
    t.loss_mask = {0, 0};
    t.logprobs = {0, 0};
    for (int64_t i = 0; i < length; ++i) t.append_sampled(static_cast<int32_t>(i), -1);
    t.prompt_length = 2;
    t.max_tokens = 20;
    t.text = text;
  }
  return out;
}

TEST(Overlong, FallsOverTheBufferAndStaysThere) {
  const RewardConfig config{.name = "overlong", .buffer = 5};
  for (const int64_t length : {0, 1, 14, 15}) EXPECT_EQ(value_of(config, length), 0) << length;
  EXPECT_EQ(value_of(config, 16), -0.2);
  EXPECT_EQ(value_of(config, 18), -0.6);
  EXPECT_EQ(value_of(config, 20), -1);
  EXPECT_EQ(value_of(config, 30), -1);
  EXPECT_FALSE(std::signbit(value_of(config, 15)));
}

TEST(Overlong, TakesItsOwnLimitAndPenalty) {
  const RewardConfig config{.name = "overlong", .buffer = 4, .max_length = 10, .penalty = 0.5};
  EXPECT_EQ(value_of(config, 6), 0);
  EXPECT_EQ(value_of(config, 7), -0.125);
  EXPECT_EQ(value_of(config, 10), -0.5);
  EXPECT_EQ(value_of(config, 20), -0.5);
}

TEST(Length, IsProportionalUpToTheLimit) {
  EXPECT_EQ(value_of({.name = "length"}, 0), 0);
  EXPECT_EQ(value_of({.name = "length"}, 5), -0.25);
  EXPECT_EQ(value_of({.name = "length", .penalty = 2}, 15), -1.5);
  EXPECT_EQ(value_of({.name = "length", .max_length = 10}, 15), -1);
}

TEST(Repetition, CountsNGramsOfTokens) {
  EXPECT_EQ(repetition_of({.name = "repetition"}, {}), 0);
  EXPECT_EQ(repetition_of({.name = "repetition"}, {4, 4}), 0);
  EXPECT_EQ(repetition_of({.name = "repetition"}, {4, 4, 4}), 0);
  EXPECT_EQ(repetition_of({.name = "repetition"}, {4, 4, 4, 4}), -0.5);
  // Six bigrams: 12 twice, 23 twice, 31 and 34.
  EXPECT_EQ(repetition_of({.name = "repetition", .n = 2, .penalty = 3}, {1, 2, 3, 1, 2, 3, 4}), -1);
  EXPECT_EQ(repetition_of({.name = "repetition", .n = 1}, {1, 2, 1, 1}), -0.5);
}

TEST(RewardsOfTokens, DoNotApplyWhereTheTokensOrTheLimitAreUnknown) {
  const Example example;
  for (const RewardConfig& config :
       {RewardConfig{.name = "overlong", .buffer = 5}, RewardConfig{.name = "length"}}) {
    EXPECT_TRUE(std::isnan(make_reward(config, nullptr)({example, "text"}))) << config.name;
    EXPECT_TRUE(std::isnan(value_of(config, 5, 0))) << config.name;
  }
  EXPECT_TRUE(std::isnan(make_reward({.name = "repetition"}, nullptr)({example, "text"})));
}

TEST(Cosine, ScalesTheRewardThatItNames) {
  // The named reward comes later, is the second of its kind, and has a threshold.
  const RewardSet set({{.name = "cosine",
                        .weight = 2,
                        .correct = "contains_2",
                        .threshold = 0.5,
                        .right = {4, 2},
                        .wrong = {-8, 0}},
                       {.name = "contains", .weight = 0, .pattern = "x"},
                       {.name = "contains", .weight = 0}},
                      nullptr);
  const Example problem{.prompt = "?", .answer = "7"};
  const auto scores = set.score(
      {&problem, 1}, completions({{"7", 0}, {"7", 10}, {"7", 20}, {"7", 25}, {"x", 10}, {"", 20}}));
  const std::vector<double> want = {4, 3, 2, 2, -4, 0};
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_NEAR(scores.each[0][i], want[i], 1e-12) << i;
    EXPECT_NEAR(scores.total[i], 2 * want[i], 1e-12) << i;
  }
}

TEST(Cosine, AppliesToTheExamplesOfTheRewardThatItNames) {
  const RewardSet set({{.name = "numeric"}, {.name = "cosine", .correct = "numeric"}}, nullptr);
  const std::vector<Example> problems = {{.prompt = "?", .answer = "x"},
                                         {.prompt = "?", .answer = "7"}};
  const auto scores = set.score(problems, completions({{"7", 20}, {"7", 20}}));
  EXPECT_TRUE(std::isnan(scores.each[1][0]));
  EXPECT_EQ(scores.each[1][1], 0.5);
}

TEST(RewardsOfTokens, CountSampledTokensOnly) {
  const RewardSet set({{.name = "length"}, {.name = "repetition"}}, nullptr);
  const Example problem;
  std::vector<Trajectory> one = completions({{"", 3}});
  // A token that the policy has not sampled, such as a tool's answer.
  one[0].tokens.push_back(5);
  one[0].loss_mask.push_back(0);
  one[0].append_sampled(3, -1);
  const auto scores = set.score({&problem, 1}, one);
  EXPECT_EQ(scores.each[0][0], -0.2);
  EXPECT_EQ(scores.each[1][0], 0);
}

TEST(RewardsOfTokens, SayWhatIsWrong) {
  const auto refused = [](const std::vector<RewardConfig>& configs, const std::string& text) {
    EXPECT_THROW_WITH(RewardSet(configs, nullptr), InputError, text);
  };
  refused({{.name = "overlong"}}, "rewards[0] 'overlong': buffer: needs a number of tokens");
  refused({{.name = "overlong", .buffer = 11, .max_length = 10}},
          "rewards[0] 'overlong': buffer: 11 is more than max_length, 10");
  refused({{.name = "cosine"}}, "rewards[0] 'cosine': correct: needs the name of the reward");
  refused({{.name = "numeric"}, {.name = "cosine", .correct = "numerik"}},
          "rewards[1] 'cosine': correct: 'numerik' is none of the other rewards: numeric; did you "
          "mean 'numeric'?");
  refused({{.name = "cosine", .correct = "cosine"}}, "'cosine' is none of the other rewards");
  refused({{.name = "cosine", .correct = "task", .right = {1}}},
          "right: expected 2 values, of no tokens and of max_length, got 1");
  EXPECT_THROW_WITH(make_reward({.name = "cosine", .correct = "math"}, nullptr), InputError,
                    "cosine is computed from another reward of the list; hint: use that one, math");
}

TEST(RewardConfig, KeysBelongToTheRewardsThatTakeThem) {
  const auto refused = [](const RewardConfig& config, const std::string& text) {
    EXPECT_THROW_WITH(make_reward(config, nullptr), InputError, text);
  };
  refused({.name = "numeric", .buffer = 3},
          "buffer: this reward does not take it; hint: it takes name, weight and pattern");
  refused({.name = "length", .n = 2}, "n: this reward does not take it");
  refused({.name = "repetition", .pattern = "(.*)"},
          "pattern: this reward does not take it; hint: it takes name, weight and n penalty");
  refused({.name = "math", .program = {.workers = 2}}, "workers: this reward does not take it");
  refused({.name = "overlong", .buffer = 3, .right = {1, 0}}, "right: this reward does not");
  for (const char* text : {"penalty: -1", "n: 0", "n: 65", "buffer: -1", "max_length: -1"}) {
    RewardConfig config;
    EXPECT_THROW(read_config(config, parse_yaml(str("{name: length, ", text, "}"), "test")),
                 InputError)
        << text;
  }
}

}  // namespace
}  // namespace cohort
