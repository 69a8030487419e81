// Rewards of external programs, with and without the Python helper.
#include <cmath>
#include <filesystem>

#include "core/log.h"
#include "rl/reward.h"
#include "rl/rewards/external.h"
#include "tests/support/test_util.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

const std::string kHelper =
    (fs::path(__FILE__).parent_path().parent_path().parent_path() / "scripts/cohort_reward.py")
        .string();

class ExternalReward : public testing::Test {
 protected:
  RewardConfig python(const std::string& body) const {
    write_file(dir_.path("reward.py"), body);
    return program("python3 '" + kHelper + "' reward.py");
  }
  RewardConfig program(const std::string& run) const {
    return {.name = "command", .program = {.run = run, .directory = dir_.path(""), .workers = 2}};
  }
  // Scores completions of two prompts.
  RewardSet::Scores score(const RewardSet& rewards, const std::vector<std::string>& texts) const {
    std::vector<Trajectory> all;
    for (const std::string& text : texts) {
      Trajectory& t = all.emplace_back();
      t.text = text;
      t.index = 100 + static_cast<int64_t>(all.size());
    }
    // Half of them are submitted early, in another order.
    for (size_t i = all.size() / 2; i-- > 0;)
      rewards.submit(prompts_[i * 2 / all.size()], all[i], 7);
    return rewards.score(prompts_, all, 7);
  }
  const std::vector<Example> prompts_ = {
      {.prompt = "a", .answer = "1", .fields = Json().set("unit", "m")},
      {.prompt = "b", .answer = "22", .fields = Json().set("more", 3)}};
  TempDir dir_;
};

TEST_F(ExternalReward, EqualsTheBuiltInReward) {
  RewardConfig own = python(
      "def reward(completions, answers, **fields):\n"
      "    return [c.strip() == a for c, a in zip(completions, answers)]\n");
  for (const bool batch : {false, true}) {
    own.batch = batch;
    const RewardSet rewards({own, {.name = "exact_match", .weight = 2}}, nullptr);
    std::vector<std::string> texts;
    for (int i = 0; i < 60; ++i) texts.push_back(std::to_string(i % 30));
    const RewardSet::Scores scores = score(rewards, texts);
    EXPECT_EQ(scores.each[0], scores.each[1]);
    EXPECT_EQ(scores.total[1], 3);
    EXPECT_EQ(scores.failed[0], 0);
    EXPECT_FALSE(scores.failed[1].has_value());
  }
}

TEST_F(ExternalReward, CountsAsOftenAsItIsNamed) {
  RewardConfig once =
      python("def reward(completions, **fields): return [len(c) for c in completions]");
  RewardConfig twice = once;
  twice.weight = 10;
  const RewardSet::Scores scores = score(RewardSet({once, twice}, nullptr), {"x", "xx"});
  EXPECT_EQ(scores.each[0], (std::vector<double>{1, 2}));
  EXPECT_EQ(scores.each[1], scores.each[0]);
  EXPECT_EQ(scores.total[1], 22);
}

TEST_F(ExternalReward, EqualConfigurationsShareProgramsThatRun) {
  RewardConfig own = python(
      "import os\n"
      "def reward(completions, **fields): return [os.getpid()] * len(completions)\n");
  own.program.workers = 1;
  const auto running = std::make_shared<cohort::ExternalReward>(own);
  const auto process = [&](const RewardConfig& config) {
    return score(RewardSet({config}, nullptr, running), {"x", "y"}).each[0][0];
  };
  const double first = process(own);
  own.weight = 2;
  EXPECT_EQ(process(own), first);
  own.program.timeout = 9;
  EXPECT_NE(process(own), first);
}

// TRL gives lists of messages.
TEST_F(ExternalReward, AFunctionThatTakesCompletionsForMessagesGetsAHint) {
  const auto error = [&](const std::string& each) {
    const RewardSet rewards(
        {python("def reward(completions, **fields): return [" + each + " for c in completions]")},
        nullptr);
    return score(rewards, {"x", "", "y", "z"}).first_error[0];
  };
  for (const char* content : {"len(c[0]['content'])", "len(c['content'])", "c.get('content')"})
    EXPECT_NE(error(content).find("completions are texts, not messages, without @conversational: "),
              std::string::npos)
        << error(content);
  EXPECT_EQ(error("1 / 0").find("texts"), std::string::npos);
}

TEST_F(ExternalReward, ReceivesAllFields) {
  const RewardSet rewards(
      {python("def reward(completions, prompts, unit=None, more=None, **rest):\n"
              "    print(prompts, unit, more, sorted(rest))\n"
              "    return [len(c) + (more or [0])[0] for c in completions]\n")},
      nullptr);
  EXPECT_EQ(score(rewards, {"x", "\xc3\xa4\n\"", "", "xx"}).each[0],
            (std::vector<double>{1, 3, 3, 5}));
}

class CommandRewardLengths : public ExternalReward {
 protected:
  // Scores a completion of 3 sampled tokens of at most 8, which stop with `reason`.
  RewardSet::Scores score_sampled(const RewardConfig& config, StopReason reason) const {
    const Trajectory sampled{.tokens = {1, 5, 6, 7},
                             .loss_mask = {0, 1, 1, 1},
                             .prompt_length = 1,
                             .max_tokens = 8,
                             .stop_reason = reason,
                             .text = "x"};
    return RewardSet({config}, nullptr).score({prompts_.data(), 1}, {&sampled, 1}, 7);
  }
};

TEST_F(CommandRewardLengths, ProgramsReceiveWhatTheSamplerKnows) {
  const std::vector<std::pair<StopReason, std::string>> reasons = {
      {StopReason::kStopToken, "stop_token"},
      {StopReason::kStopString, "stop_string"},
      {StopReason::kLength, "length"},
      {StopReason::kContext, "context"},
      {StopReason::kCancelled, "cancelled"}};
  for (const auto& [reason, name] : reasons) {
    const char* truncated = is_truncated(reason) ? "True" : "False";
    EXPECT_EQ(score_sampled(python(str("def reward(completions, lengths, max_lengths, truncated, "
                                       "stop_reasons, **rest):\n"
                                       "    assert truncated == [",
                                       truncated, "] and stop_reasons == ['", name,
                                       "'], stop_reasons\n"
                                       "    return [10 * lengths[0] + max_lengths[0]]\n")),
                            reason)
                  .total[0],
              38)
        << name;
  }
}

// With functions that take no further arguments, fields of the same name, and unknown tokens.
TEST_F(CommandRewardLengths, OlderFunctionsStillWork) {
  const RewardConfig strict = python(
      "def reward(completions, prompts, answers, messages, unit=None, more=None):\n"
      "    return [1] * len(completions)\n");
  EXPECT_EQ(score_sampled(strict, StopReason::kLength).total[0], 1);
  write_file(dir_.path("reward.py"),
             "def reward(completions, truncated, lengths, **rest):\n"
             "    return [truncated[0] if lengths == [None] else -1]\n");
  const Example own{.prompt = "a", .answer = "1", .fields = Json().set("truncated", 5)};
  const Trajectory unknown{.text = "x"};
  const RewardSet set({program("python3 '" + kHelper + "' reward.py")}, nullptr);
  EXPECT_EQ(set.score({&own, 1}, {&unknown, 1}).total[0], 5);
}

TEST_F(ExternalReward, FailuresHaveNoReward) {
  const RewardSet rewards({python("import os\n"
                                  "def reward(completions, **fields):\n"
                                  "    if completions[0] == 'die': os._exit(1)\n"
                                  "    if completions[0] == 'raise': raise ValueError('oh')\n"
                                  "    if completions[0] == 'nan': return [float('nan')]\n"
                                  "    return [None if completions[0] == 'none' else 0.5]\n")},
                          nullptr);
  const RewardSet::Scores scores = score(rewards, {"x", "die", "raise", "nan", "none", "x"});
  for (const size_t i : {1, 2, 3, 4}) EXPECT_TRUE(std::isnan(scores.total[i])) << i;
  EXPECT_EQ(scores.total[0], 0.5);
  EXPECT_EQ(scores.total[5], 0.5);
  EXPECT_EQ(scores.failed[0], 3);  // null means that it does not apply
  for (const size_t i : {0, 4, 5}) EXPECT_EQ(scores.errors[i], "") << i;
  for (const size_t i : {1, 2, 3})
    EXPECT_TRUE(scores.errors[i].starts_with("reward command: ")) << i;
  EXPECT_NE(scores.first_error[0].find("(exit code 1)"), std::string::npos)
      << scores.first_error[0];
}

// With rewards that are not finite, and with child processes that read and print.
TEST_F(ExternalReward, ThePythonHelperStaysAliveAndInStep) {
  write_file(dir_.path("beside.py"), "import os\npids = set()\n");
  RewardConfig own = python(
      "from __future__ import annotations\n"
      "import beside, dataclasses, os\n"
      "@dataclasses.dataclass\n"
      "class Value: x: float\n"
      "def reward(completions, **fields):\n"
      "    os.system('cat; echo printed')\n"
      "    beside.pids.add(os.getpid())\n"
      "    known = {'nan': float('nan'), 'inf': float('inf'), '\u00e4': 7, 'two': 2}\n"
      "    if 'many' in completions: return [1] * 9\n"
      "    return [Value(known.get(c, len(beside.pids))).x for c in completions]\n");
  own.program.workers = 1;
  // With a locale that is not UTF-8.
  own.program.run = "env PYTHONUTF8=0 PYTHONIOENCODING=latin-1 " + own.program.run;
  const RewardSet::Scores single =
      score(RewardSet({own}, nullptr), {"nan", "inf", "\xc3\xa4", "many"});
  EXPECT_EQ(single.failed[0], 3);
  EXPECT_EQ(single.first_error[0], "it reports: 'the reward is nan'");
  EXPECT_EQ(single.total[2], 7);
  own.batch = true;
  const RewardSet::Scores list = score(RewardSet({own}, nullptr), {"x", "nan", "two", "\xc3\xa4"});
  EXPECT_EQ(list.failed[0], 1);
  EXPECT_TRUE(std::isnan(list.total[1]));
  EXPECT_EQ(list.total[0] + list.total[2] + list.total[3], 10);
}

TEST_F(ExternalReward, EachListFailsWithItsOwnError) {
  RewardConfig own = python(
      "def reward(completions, **fields):\n"
      "    raise ValueError('no score for ' + completions[0])\n");
  own.batch = true;
  cohort::ExternalReward reward(own);
  for (int64_t i = 0; i < 4; ++i)
    reward.submit({.example = prompts_[0],
                   .completion = std::string_view("abcd").substr(static_cast<size_t>(i), 1),
                   .index = i});
  const auto results = reward.collect();
  ASSERT_EQ(results.size(), 4);
  for (const auto& [index, result] : results)
    EXPECT_NE(result.error.find(index < 2 ? "no score for a" : "no score for c"), std::string::npos)
        << index << ": " << result.error;
}

TEST_F(ExternalReward, ACallbacksTextIsNoReward) {
  RewardConfig own{.name = "mine"};
  own.program.callback = std::make_shared<const Callback>([](std::span<const Json> requests) {
    return std::vector<Json>(requests.size(), Json("good"));
  });
  EXPECT_THROW_WITH(score(RewardSet({own}, nullptr), {"x", "y"}), InputError,
                    "reward mine: its function returned 'good' for completion 101");
}

TEST_F(ExternalReward, InvalidAnswersAreFailures) {
  const auto error = [&](const std::string& answer) {
    write_file(dir_.path("liar.sh"), "while read -r line; do echo '" + answer + "'; done");
    return score(RewardSet({program("sh liar.sh")}, nullptr), {"x", "y"}).first_error[0];
  };
  for (const auto& [answer, expected] :
       {std::pair{"yes", "its answer is not valid JSON: 'yes'"},
        {"[]", "is not an object"},
        {"{\"index\": 99, \"reward\": 1}", "does not have the index"},
        {"{\"reward\": 1}", "does not have the index"},
        {"{\"index\": 101}", "neither 'reward' nor 'error'"},
        {"{\"index\": 101, \"reward\": \"1\"}", "neither a number nor null"},
        {"{\"index\": 101, \"reward\": 1e999}", "is not"},
        {"{\"index\": 101, \"error\": \"no idea\"}", "it reports: 'no idea'"}})
    EXPECT_NE(error(answer).find(expected), std::string::npos) << answer << ": " << error(answer);
}

TEST_F(ExternalReward, CallbacksSeeTheTextThatProgramsSee) {
  std::string seen;
  RewardConfig own{.name = "mine", .weight = 3};
  own.program.callback = std::make_shared<const Callback>([&](std::span<const Json> requests) {
    seen = requests[1].at("completion").as_string();
    return std::vector<Json>{0.5, {}};
  });
  const RewardSet::Scores scores = score(RewardSet({own}, nullptr), {"x", "\xff"});
  EXPECT_EQ(seen, "\xef\xbf\xbd");
  EXPECT_EQ(scores.total[0], 1.5);
  EXPECT_TRUE(std::isnan(scores.total[1]));
  EXPECT_EQ(scores.failed[0], 0);
}

TEST_F(ExternalReward, ProgramsThatCannotRunAreNamed) {
  EXPECT_THROW_WITH(RewardSet({program("")}, nullptr), InputError,
                    "rewards[0] 'command': needs a program to run");
  const RewardSet rewards({program("no-such-program")}, nullptr);
  EXPECT_THROW_WITH(score(rewards, {"x", "y"}), InputError, "cannot run 'no-such-program'");
}

}  // namespace
}  // namespace cohort::test
