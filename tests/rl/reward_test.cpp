// Rewards: every entry of the table on garbage and on hostile text, the verdicts of each kind, and
// sets.
#include "rl/reward.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <limits>

#include "core/rng.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

Example countdown_example() {
  Json fields = Json::Object{};
  fields.set("numbers", Json::Array{3, 7, 25}).set("target", 46);
  return {.prompt = "3 7 25 -> 46\n", .answer = "46", .solution = "3*7+25", .fields = fields};
}

Example with_answer(const std::string& answer) {
  return {.prompt = "?", .answer = answer, .solution = answer, .fields = Json::Object{}};
}

RewardFn make(const RewardConfig& config, const Task* task = nullptr) {
  return make_reward(config, task);
}

// All rewards that make_reward() computes: neither is_external() nor `cosine`.
std::vector<RewardEntry> built_in() {
  std::vector<RewardEntry> out = reward_table();
  std::erase_if(out, [](const RewardEntry& entry) {
    const std::string name = entry.name;
    return is_external({.name = name}) || name == "cosine";
  });
  return out;
}

// A valid configuration.
RewardConfig config_of(const RewardEntry& entry, const std::string& pattern = "(?s)(.*)") {
  RewardConfig config{.name = entry.name};
  if (entry.keys == std::string("pattern")) config.pattern = pattern;
  if (config.name == "overlong") config.buffer = 10;
  return config;
}
// One token per byte.
RewardInput input_of(const Example& example, const std::string& text) {
  RewardInput in{example, text};
  in.tokens.emplace(text.begin(), text.end());
  in.max_tokens = 30;
  static const Json transcript = Json::Array{};
  in.transcript = &transcript;
  in.environment_reward = 0;
  return in;
}

RewardSet::Scores score(const RewardSet& rewards, const std::vector<Example>& prompts,
                        const std::vector<std::string>& completions) {
  std::vector<Trajectory> trajectories;
  for (const std::string& text : completions) trajectories.emplace_back().text = text;
  return rewards.score(prompts, trajectories);
}

TEST(RewardTable, EveryEntryIsFiniteBoundedAndDeterministicOnGarbage) {
  const Example example = countdown_example();
  const std::string alphabet = "0123456789+-*/(). ,$%#=\n\tabc<think>";
  Rng rng(1, rng_stream(kTestPurpose));
  for (const RewardEntry& entry : built_in()) {
    const RewardFn reward = make(config_of(entry), &find_task("countdown"));
    const RewardFn again = make(config_of(entry), &find_task("countdown"));
    for (int trial = 0; trial < 500; ++trial) {
      std::string text(static_cast<size_t>(rng.below(40)), ' ');
      for (char& c : text)
        c = trial % 2
                ? static_cast<char>(rng.below(256))
                : alphabet[static_cast<size_t>(rng.below(static_cast<int64_t>(alphabet.size())))];
      const double value = reward(input_of(example, text));
      const double sign = scores_tokens(config_of(entry)) ? -1 : 1;
      EXPECT_TRUE(sign * value >= 0 && sign * value <= 1) << entry.name << ": " << value;
      EXPECT_EQ(value, reward(input_of(example, text)));
      EXPECT_EQ(value, again(input_of(example, text)));
    }
  }
}

TEST(RewardTable, HostileCompletionsCostBoundedWork) {
  const size_t n = 100'000;
  std::vector<std::string> hostile = {std::string(n, '1'),
                                      std::string(n, '('),
                                      std::string(n, ' '),
                                      std::string(n, '\0'),
                                      std::string(n, '\xff'),
                                      std::string(n, '-'),
                                      "0." + std::string(n, '0') + "1",
                                      "1/" + std::string(n, '0')};
  std::string commas = "1", words;
  for (size_t i = 0; i < n / 4; ++i) commas += ",000";
  for (size_t i = 0; i < n / 8; ++i) words += "#### 18 ";
  hostile.insert(hostile.end(), {commas, words});
  const auto start = std::chrono::steady_clock::now();
  for (const RewardEntry& entry : built_in())
    for (const char* pattern : {"(?s)(.*)", "#### *([^ ]+)"})
      for (const std::string& text : hostile) {
        const RewardFn reward = make(config_of(entry, pattern), &find_task("countdown"));
        const double value = reward(input_of(countdown_example(), text));
        if (entry.name == std::string("repetition"))
          EXPECT_TRUE(value < -0.99 && value > -1) << value;
        else
          EXPECT_TRUE(std::abs(value) == 0 || std::abs(value) == 1) << entry.name << " " << value;
      }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  EXPECT_LT(seconds.count(), 60);  // 100 calls; a superlinear algorithm takes hours
}

TEST(RewardTable, ExponentialPatternsAreAborted) {
  const RewardFn reward = make({.name = "format", .weight = 1, .pattern = "(a+)+"});
  EXPECT_EQ(reward({with_answer(""), std::string(40, 'a')}), 1);
  EXPECT_EQ(reward({with_answer(""), std::string(40, 'a') + "!"}), 0);  // 2^40 ways to fail
}

TEST(ExactMatch, ComparesTheFoundTextWithoutSurroundingBlanks) {
  const RewardFn whole = make({.name = "exact_match"});
  EXPECT_EQ(whole({with_answer("abc"), " abc\n"}), 1);
  EXPECT_EQ(whole({with_answer("abc\n"), "abc"}), 1);
  EXPECT_EQ(whole({with_answer("abc"), "abcd"}), 0);
  EXPECT_EQ(whole({with_answer("abc"), "ab c"}), 0);
  EXPECT_EQ(whole({with_answer("abc"), std::string("abc\0", 4)}), 0);
  const RewardFn last = make({.name = "exact_match", .weight = 1, .pattern = "<a>(.*?)</a>"});
  EXPECT_EQ(last({with_answer("2"), "<a>1</a> no: <a> 2 </a>."}), 1);
  EXPECT_EQ(last({with_answer("1"), "<a>1</a> no: <a>2</a>"}), 0);
  EXPECT_EQ(last({with_answer("2"), "2"}), 0);
  // Without a known answer no completion is right, not even an empty one.
  for (const char* none : {"", " \n"}) {
    EXPECT_TRUE(std::isnan(whole({with_answer(none), ""})));
    EXPECT_TRUE(std::isnan(last({with_answer(none), "<a></a>"})));
  }
  const RewardFn no_group = make({.name = "exact_match", .weight = 1, .pattern = "\\d+"});
  EXPECT_EQ(no_group({with_answer("34"), "12, then 34!"}), 1);
}

TEST(Distinct, IsTheFractionOfDistinctRunsOfFourWords) {
  const RewardFn reward = make({.name = "distinct"});
  const auto of = [&](const char* text) { return reward({Example{}, text}); };
  EXPECT_EQ(of("one two three four five"), 1);
  EXPECT_EQ(of("a a a a a a"), 1.0 / 3);    // three runs, all the same
  EXPECT_EQ(of("a b c d a\nb  c d"), 0.8);  // one of five runs is a repetition
  EXPECT_EQ(of("too short here"), 0);
  EXPECT_EQ(of(""), 0);
}

TEST(Contains, FindsTheAnswerAnywhereInTheFoundText) {
  const RewardFn whole = make({.name = "contains"});
  EXPECT_EQ(whole({with_answer(" Paris\n"), "It is Paris."}), 1);
  EXPECT_EQ(whole({with_answer("Paris"), "It is paris."}), 0);
  EXPECT_EQ(whole({with_answer("Paris"), ""}), 0);
  EXPECT_TRUE(std::isnan(whole({with_answer(""), "anything"})));
  EXPECT_TRUE(std::isnan(whole({with_answer(" \n"), "any thing"})));
  const RewardFn tagged = make({.name = "contains", .weight = 1, .pattern = "<a>(.*?)</a>"});
  EXPECT_EQ(tagged({with_answer("7"), "7 <a>6 or 7</a>"}), 1);
  EXPECT_EQ(tagged({with_answer("7"), "7 <a>6</a>"}), 0);
  EXPECT_EQ(tagged({with_answer("7"), "7"}), 0);
}

TEST(Rewards, AnyOfSeveralAnswersIsRight) {
  const auto value = [](const char* name, const char* completion) {
    Example example = with_answer("x = 3");
    example.other_answers = {"7", "Paris"};
    return make({.name = name})({example, completion});
  };
  for (const char* name : {"exact_match", "contains", "math"}) {
    EXPECT_EQ(value(name, "x = 3"), 1) << name;
    EXPECT_EQ(value(name, "7"), 1) << name;
    EXPECT_EQ(value(name, "Paris"), 1) << name;
    EXPECT_EQ(value(name, "8"), 0) << name;
  }
  EXPECT_EQ(value("numeric", "7.0"), 1);  // the others are no numbers
  EXPECT_EQ(value("numeric", "8"), 0);
  EXPECT_EQ(value("distinct", "a a a a a a"), 1.0 / 3);  // needs no answer
  // In sets, too.
  Example example = with_answer("a");
  example.other_answers = {"b"};
  const auto scores =
      score(RewardSet({{.name = "exact_match"}}, nullptr), {example}, {"a", "b", "c"});
  EXPECT_EQ(scores.total, (std::vector<double>{1, 1, 0}));
}

TEST(Numeric, AnswersMayHaveAnExponentAsInJson) {
  const RewardFn reward = make({.name = "numeric"});
  EXPECT_EQ(reward({with_answer("1e5"), "100,000"}), 1);
  EXPECT_EQ(reward({with_answer("-1.5E-3"), "-0.0015"}), 1);
  EXPECT_EQ(reward({with_answer("1e5"), "1e5"}), 1);
  EXPECT_EQ(reward({with_answer("1e5"), "10e4"}), 0);  // completions are decimals
  EXPECT_TRUE(std::isnan(reward({with_answer("1e400"), "1"})));
  EXPECT_TRUE(std::isnan(reward({with_answer("e"), "1"})));
}

TEST(Format, MatchesTheWholeCompletion) {
  const RewardFn reward = make({.name = "format", .weight = 1, .pattern = "<t>[^<]*</t>\\d+"});
  EXPECT_EQ(reward({with_answer(""), "<t>hm</t>42"}), 1);
  EXPECT_EQ(reward({with_answer(""), " <t>hm</t>42"}), 0);
  EXPECT_EQ(reward({with_answer(""), "<t>hm</t>42\n"}), 0);
  EXPECT_EQ(reward({with_answer(""), "<t>\xff</t>42"}), 0);
}

TEST(Numeric, ComparesExactFractions) {
  const RewardFn reward = make({.name = "numeric"});
  struct Case {
    const char *answer, *completion;
    double value;
  };
  const Case cases[] = {
      {"18", "18", 1},
      {"18", " 18.\n", 1},
      {"18", "18.0", 1},
      {"18", "018", 1},
      {"18", "+18", 1},
      {"18", "$18", 1},
      {"18", "18 $", 1},
      {"18", "$18.00.", 1},
      {"18", "18%", 1},
      {"18", "18 %.", 1},
      {"18", "36/2", 1},
      {"18", "17", 0},
      {"18", "-18", 0},
      {"18", "1 8", 0},
      {"18", "18 eggs", 0},
      {"18", "18..", 0},
      {"18", "18e0", 0},
      {"18", "0x12", 0},
      {"18", "", 0},
      {"18", ".", 0},
      {"18", "$", 0},
      {"18", "nan", 0},
      {"-5", "-5", 1},
      {"-5", "-$5", 1},
      {"-5", "$-5", 1},
      {"-5", "--5", 0},
      {"-5", "+-5", 0},
      {"-5", "- 5", 0},
      {"0", "-0", 1},
      {"0", "0/7", 1},
      {"1234", "1,234", 1},
      {"1,234", "1234.0", 1},
      {"1234567.5", "1,234,567.50", 1},
      {"1234", "12,34", 0},
      {"1234", "1234,", 0},
      {"1234", "1,2345", 0},
      {"1234567", "1234,567", 0},
      {".5", "0.5", 1},
      {"0.5", "1/2", 1},
      {"1/3", "2 / 6", 1},
      {"1/3", "0.3333333333333333", 0},
      {"1/3", "1/0", 0},
      {"1/3", "1/3/1", 0},
      {"0.1", "0.1000000000000000000000000000001", 0},
      {"9007199254740993", "9007199254740992", 0},  // one double, two numbers
      {"0.30000000000000004", "0.3", 0},
      {"99999999999999999999999999999999999999", "99999999999999999999999999999999999999.0", 1},
      {"99999999999999999999999999999999999999", "99999999999999999999999999999999999998", 0},
      {"1", "100000000000000000000000000000000000000000/100000000000000000000000000000000000000000",
       0},  // more digits than are supported
  };
  for (const Case& c : cases)
    EXPECT_EQ(reward({with_answer(c.answer), c.completion}), c.value)
        << c.answer << " against " << c.completion;
  for (const char* answer : {"", "abc", "1,23", "1/0"})
    EXPECT_TRUE(std::isnan(reward({with_answer(answer), "1"}))) << answer;
}

TEST(Numeric, FindsTheNumberInAWorkedAnswerToo) {
  const RewardFn reward = make({.name = "numeric", .weight = 1, .pattern = "#### *(\\S+)"});
  const Example worked = with_answer("9 * 2 = 18, and a thousand more.\n#### 1,018");
  EXPECT_EQ(reward({worked, "so #### 7, no: #### 1018."}), 1);
  EXPECT_EQ(reward({worked, "#### 18"}), 0);
  EXPECT_EQ(reward({worked, "1018"}), 0);
  EXPECT_EQ(reward({with_answer("1018"), "#### 1,018"}), 1);
  EXPECT_TRUE(std::isnan(reward({with_answer("no number"), "#### 18"})));
}

TEST(Numeric, EveryRealGsm8kSolutionIsRight) {
  COHORT_REQUIRE_DATA(dir);
  const auto set = load_jsonl({.path = {dir + "/gsm8k/test.jsonl"}, .prompt = "{question}"}).train;
  const RewardFn reward = make({.name = "numeric", .weight = 1, .pattern = "####\\s*(\\S+)"});
  ASSERT_GT(set->size(), 1000);
  for (int64_t i = 0; i < set->size(); ++i) {
    const Example example = set->get(i);
    EXPECT_EQ(reward({example, example.solution}), 1) << example.solution;
    EXPECT_EQ(reward({example, example.solution + "1"}), 0) << example.solution;
  }
}

TEST(TaskReward, AsksTheTasksChecker) {
  const RewardFn reward = make({.name = "task"}, &find_task("reverse"));
  EXPECT_EQ(reward({with_answer("acbd"), "acbd"}), 1);
  EXPECT_EQ(reward({with_answer("acbd"), "abcd"}), 0);
  const RewardFn tagged =
      make({.name = "task", .weight = 1, .pattern = "=(.*)"}, &find_task("reverse"));
  EXPECT_EQ(tagged({with_answer("acbd"), "x=acbd"}), 1);
  EXPECT_EQ(tagged({with_answer("acbd"), "acbd"}), 0);
}

TEST(CountdownReward, ChecksTheExpressionAgainstTheFields) {
  const RewardFn whole = make({.name = "countdown"});
  EXPECT_EQ(whole({countdown_example(), "3*7+25"}), 1);
  EXPECT_EQ(whole({countdown_example(), " (25 + 7*3)\n"}), 1);
  EXPECT_EQ(whole({countdown_example(), "3+7+25"}), 0);
  EXPECT_EQ(whole({countdown_example(), "46"}), 0);
  const RewardFn tagged =
      make({.name = "countdown", .weight = 1, .pattern = "(?s)<answer>(.*?)</answer>"});
  EXPECT_EQ(tagged({countdown_example(), "3+7? <answer>3*7+25</answer>"}), 1);
  EXPECT_EQ(tagged({countdown_example(), "3*7+25"}), 0);
}

TEST(CountdownReward, IsNotApplicableWithoutItsFields) {
  const RewardFn reward = make({.name = "countdown"});
  EXPECT_TRUE(std::isnan(reward({with_answer("46"), "46"})));
  EXPECT_TRUE(std::isnan(reward({Example{}, "46"})));
  for (const char* fields :
       {R"({"numbers": [1, 2]})", R"({"target": 3})", R"({"numbers": [1, "2"], "target": 3})",
        R"({"numbers": 3, "target": 3})", R"({"numbers": [3], "target": "3"})"}) {
    Example example = with_answer("");
    example.fields = parse_json(fields, "test");
    EXPECT_TRUE(std::isnan(reward({example, "1+2"}))) << fields;
  }
}

TEST(RewardSet, SumsTheWeightedApplicableRewards) {
  const RewardSet set({{.name = "exact_match", .weight = 2},
                       {.name = "numeric", .weight = 0.5},
                       {.name = "numeric", .weight = 0.25, .pattern = "=(.*)"}},
                      nullptr);
  EXPECT_EQ(set.names(), (std::vector<std::string>{"exact_match", "numeric", "numeric_2"}));
  const auto scores =
      score(set, {with_answer("7"), with_answer("x")}, {"7", "7.0", "=7", "x", "7", "=x"});
  EXPECT_EQ(scores.each[0], (std::vector<double>{1, 0, 0, 1, 0, 0}));
  EXPECT_EQ(std::vector<double>(scores.each[1].begin(), scores.each[1].begin() + 3),
            (std::vector<double>{1, 1, 0}));
  for (size_t i = 3; i < 6; ++i) EXPECT_TRUE(std::isnan(scores.each[1][i]));
  EXPECT_EQ(scores.total, (std::vector<double>{2.5, 0.5, 0.25, 2, 0, 0}));
}

// 0.1 + 0.2 - 0.3 is 6e-17, which would be a reward above that of a wrong answer.
TEST(RewardSet, WeightsThatCancelGiveExactlyZero) {
  const RewardSet set({{.name = "exact_match", .weight = 0.1},
                       {.name = "numeric", .weight = 0.2},
                       {.name = "contains", .weight = -0.3}},
                      nullptr);
  EXPECT_EQ(score(set, {with_answer("7")}, {"7", "x"}).total, (std::vector<double>{0, 0}));
}

TEST(RewardSet, TotalIsNaNIfNoRewardApplies) {
  const RewardSet set({{.name = "numeric"}}, nullptr);
  const auto scores = score(set, {with_answer("x"), with_answer("3")}, {"1", "3"});
  EXPECT_TRUE(std::isnan(scores.total[0]));
  EXPECT_EQ(scores.total[1], 1);
  EXPECT_TRUE(score(set, {}, {}).total.empty());  // a rank without prompts
  // No reward applies on this rank, which is not an error, since one may apply on another rank.
  for (const double total : score(set, {with_answer("x")}, {"1", "2"}).total)
    EXPECT_TRUE(std::isnan(total));
}

double infinite_check(const Example&, std::string_view) {
  return std::numeric_limits<double>::infinity();
}

TEST(RewardSet, SaysWhatIsWrong) {
  const auto set = [](const std::vector<RewardConfig>& configs, const Task* task = nullptr) {
    return RewardSet(configs, task);
  };
  EXPECT_THROW_WITH(
      set({{.name = "numeric"}, {.name = "numerik"}}), InputError,
      "rewards[1] 'numerik': unknown reward; known: code, command, contains, cosine, "
      "countdown, distinct, environment, exact_match, format, http, judge, length, math, numeric, "
      "overlong, repetition, task, think_format; did you mean 'numeric'?");
  EXPECT_THROW_WITH(set({{.name = "format"}}), InputError, "rewards[0] 'format': needs a pattern");
  EXPECT_THROW_WITH(set({{.name = "format", .weight = 1, .pattern = "(a"}}), InputError,
                    "rewards[0] 'format': regular expression '(a'");
  EXPECT_THROW_WITH(set({{.name = "task"}}), InputError,
                    "rewards[0] 'task': needs data from a generated task");
  EXPECT_THROW_WITH(set({{.name = "numeric", .weight = kNaN}}), InputError, "weight");

  const RewardSet numeric({{.name = "numeric"}}, nullptr);
  EXPECT_THROW_WITH(score(numeric, {with_answer("1"), with_answer("2")}, {"1", "2", "3"}), Error,
                    "as many completions of each of 2 prompts, got 3");

  Task infinite = find_task("reverse");
  infinite.check = infinite_check;
  EXPECT_THROW_WITH(score(set({{.name = "task"}}, &infinite), {with_answer("1")}, {"one\n"}),
                    InputError, "reward task is infinite for completion 0, 'one\\n'");
  EXPECT_THROW_WITH(
      score(set({{.name = "numeric", .weight = 1e308}, {.name = "numeric", .weight = 1e308}}),
            {with_answer("1")}, {"1"}),
      InputError, "reward total is infinite");
}

TEST(RewardConfig, ReadsItsKeys) {
  RewardConfig config;
  read_config(config, parse_yaml("{name: numeric, weight: 0.5, pattern: '#### (.*)'}", "test"));
  EXPECT_EQ(config.name, "numeric");
  EXPECT_EQ(config.weight, 0.5);
  EXPECT_EQ(config.pattern, "#### (.*)");
}

}  // namespace
}  // namespace cohort
