// The reward `code`. The sandbox's own tests are in tests/rl/sandbox_abuse.
#include <cmath>

#include "core/log.h"
#include "rl/reward.h"
#include "rl/rewards/rewards.h"
#include "tests/support/test_util.h"

namespace cohort::test {
namespace {

class CodeReward : public testing::Test {
 protected:
  static Json fields(const std::string& text) { return parse_json(text, "fields"); }
  static std::string fenced(const std::string& code) {
    return "So:\n```\nx = \n```\nThus:\n```python\n" + code + "\n```\nDone.";
  }
  static RewardConfig config(const CodeConfig& code = {}) {
    RewardConfig config{.name = "code", .code = code};
    config.program.workers = 1;
    return config;
  }
  // The rewards of completions of one line.
  static RewardSet::Scores score(const RewardConfig& config, const Json& fields,
                                 const std::vector<std::string>& texts,
                                 const std::string& prompt = "") {
    const Example example{.prompt = prompt, .fields = fields};
    std::vector<Trajectory> all;
    for (const std::string& text : texts) {
      Trajectory& t = all.emplace_back();
      t.text = text;
      t.index = std::ssize(all);
      if (!text.ends_with("\ndef")) continue;
      t.tokens = {1};
      t.loss_mask = {1};
      t.stop_reason = StopReason::kStopString;
    }
    const RewardSet::Scores scores =
        RewardSet({config}, nullptr).score({&example, 1}, {all.data(), all.size()});
    EXPECT_EQ(scores.failed[0], 0) << scores.first_error[0];
    return scores;
  }
};

TEST_F(CodeReward, RunsAssertions) {
  const Json mbpp = fields(R"({"test_setup_code": "two = 2",
      "test_list": ["assert add(1, 2) == 3", "assert add(two, [2][0]) == 4"]})");
  const std::vector<std::string> texts = {
      fenced("def add(a, b): return a + b"), fenced("def add(a, b): return 3"),
      fenced("def add(a, b): return"),       "def add(a, b): return a + b",
      fenced("import os; os._exit(0)"),      fenced("add = lambda a, b: sum([a, b])")};
  const RewardSet::Scores scores = score(config(), mbpp, texts);
  EXPECT_EQ(scores.total, (std::vector<double>{1, 0, 0, 0, 0, 1}));
  using Outcomes = std::map<std::string, int64_t>;
  EXPECT_EQ(scores.counts, (Outcomes{{"code/no_code", 1},
                                     {"code/passed", 2},
                                     {"code/timeouts", 0},
                                     {"rewards/code/failed", 0}}));
  EXPECT_EQ(score(config({.fence = "optional", .credit = "share"}), mbpp, texts).total,
            (std::vector<double>{1, 0.5, 0, 1, 0, 1}));
}

TEST_F(CodeReward, ContinuesThePrompt) {
  const Json line = fields(R"({"entry_point": "twice",
      "test": "def check(candidate):\n  assert candidate('a\"b') == 'a\"ba\"b'\n"})");
  const std::string prompt = "def twice(x):\n    \"\"\" 'it' \"\"\"\n";
  EXPECT_EQ(score(config({.fence = "optional", .prefix = "{prompt}"}), line,
                  {"    return x + x", "    return x", fenced("    return 2 * x"),
                   "    return x + x\n\ndef", "    return x + x\n    def twice(x\ndef"},
                  prompt)
                .total,
            (std::vector<double>{1, 0, 1, 1, 0}));
  // The tests know what the prompt defines.
  const Json halves = fields(R"({"entry_point": "twice",
      "test": "def check(candidate):\n  assert half(candidate(3)) == 3\n"})");
  EXPECT_EQ(score(config({.fence = "optional", .prefix = "{prompt}"}), halves,
                  {"    return 2 * x", "    return 7\ndef half(x): return 3"},
                  "def half(x):\n    return x / 2\ndef twice(x):\n    \"Twice.\"\n")
                .total,
            (std::vector<double>{1, 0}));
}

TEST_F(CodeReward, ComparesInputsAndOutputs) {
  EXPECT_EQ(score(config(), fields(R"({"inputs": ["1 2\n", "3 4"], "outputs": ["3\n", "7"]})"),
                  {fenced("print(sum(map(int, input().split())))"),
                   fenced("import os\nos.write(1, b'3 \\n')"), fenced("raise ValueError")})
                .total,
            (std::vector<double>{1, 0, 0}));
  EXPECT_EQ(score(config(), fields(R"({"fn_name": "f", "inputs": [[0], [2]],
                                      "outputs": [[0, 1], [2, 3]]})"),
                  {fenced("def f(x): return x, x + 1"), fenced("def f(x): return x"),
                   fenced("raise ValueError"), fenced("import nothing")})
                .total,
            (std::vector<double>{1, 0, 0, 0}));
  EXPECT_EQ(
      score(
          config({.credit = "share"}),
          fields(
              R"({"input_output": "{\"fn_name\": \"f\", \"inputs\": [[1, [2]], [5, []]], \"outputs\": [[[1, 2]], [[5]]]}"})"),
          {fenced("class Solution:\n    def f(self, a, b): return (a, *b)"),
           fenced("def f(a, b): return [5]")})
          .total,
      (std::vector<double>{1, 0.5}));
}

TEST_F(CodeReward, OtherResultsThanLiteralsNeedTestsInside) {
  const Json line = fields(R"({"test_list": ["assert list(f(3)) == [0, 1, 2]"]})");
  const std::string iterator = fenced("def f(n):\n    for i in range(n): yield i");
  EXPECT_EQ(score(config(), line, {iterator}).total[0], 0);
  EXPECT_EQ(score(config({.inside = true}), line, {iterator, fenced("f = list")}).total,
            (std::vector<double>{1, 0}));
}

TEST_F(CodeReward, LinesWithoutTestsAreNotApplicable) {
  EXPECT_TRUE(std::isnan(score(config(), fields(R"({"test": "x"})"), {fenced("x")}).total[0]));
}

TEST_F(CodeReward, ErrorsOfALineAreFailures) {
  const Example example{.fields = fields(R"({"inputs": [1, 2], "outputs": [1]})")};
  const Trajectory text{.text = fenced("pass")};
  const RewardSet::Scores scores = RewardSet({config()}, nullptr).score({&example, 1}, {&text, 1});
  EXPECT_EQ(scores.failed[0], 1);
  EXPECT_NE(scores.first_error[0].find("expected two lists of equal length"), std::string::npos)
      << scores.first_error[0];
}

TEST_F(CodeReward, OtherLanguagesNeedNamespaces) {
  RewardConfig shell = config({.sandbox = "landlock"});
  shell.program.run = "sh solution.sh";
  const Example example{.fields = fields(R"({"inputs": ["1"], "outputs": ["1"]})")};
  const Trajectory text{.text = fenced("cat")};
  const RewardSet::Scores scores = RewardSet({shell}, nullptr).score({&example, 1}, {&text, 1});
  EXPECT_NE(scores.first_error[0].find("no sandbox works here: run: other languages need"),
            std::string::npos)
      << scores.first_error[0];
}

TEST_F(CodeReward, TakesItsKeysOnly) {
  EXPECT_THROW_WITH(RewardSet({{.name = "math", .code = {.prefix = "x"}}}, nullptr), InputError,
                    "prefix: this reward does not take it");
  EXPECT_THROW_WITH(RewardSet({config({.prefix = "'\""})}, nullptr), InputError,
                    "prefix: has both kinds of quotes");
  const ProgramConfig program = code_program({}, {.prefix = "it's"});
  EXPECT_NE(program.run.find(" --prefix \"it's\""), std::string::npos) << program.run;
  EXPECT_EQ(program.timeout, 15);
}

}  // namespace
}  // namespace cohort::test
