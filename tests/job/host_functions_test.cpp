// Rewards and environments that are callbacks of the program that trains, in its one call:
// run_training().
#include <filesystem>
#include <mutex>

#include "job/replay.h"
#include "job/training.h"
#include "tests/job/small_runs.h"

namespace cohort::test {
namespace {

// With a completion without value, so that null is covered too.
constexpr const char* kProgram =
    "import json, sys\n"
    "log = open('requests.txt', 'a')\n"
    "for line in sys.stdin:\n"
    "    r = json.loads(line)\n"
    "    log.write(line)\n"
    "    log.flush()\n"
    "    c = r['completion']\n"
    "    value = None if '7' in c else 0.3 * c.count('1') + 0.1 * r['length']\n"
    "    print(json.dumps({'index': r['index'], 'reward': value}), flush=True)\n";

Json value_of(const Json& request) {
  const std::string& completion = request.at("completion").as_string();
  if (completion.find('7') != completion.npos) return {};
  const auto ones = static_cast<double>(std::ranges::count(completion, '1'));
  return 0.3 * ones + 0.1 * static_cast<double>(request.at("length").as_int());
}

std::vector<Json> values_of(std::span<const Json> requests) {
  std::vector<Json> out;
  for (const Json& request : requests) out.push_back(value_of(request));
  return out;
}

class RewardCallbacks : public testing::Test {
 protected:
  // A run in DIR/NAME with `reward` beside another, which judges evaluations too.
  TrainRequest request(const std::string& name, const std::string& reward,
                       const std::vector<std::string>& overrides = {}) const {
    const std::string yaml =
        str(kSmallModel, kSmallData,
            "trainer: grpo\nsteps: 4\nprompts_per_step: 4\nnum_generations: 6\n"
            "lr_schedule: constant\ncheckpoint: {every: 1}\noutput_dir: ",
            dir_.path(name), "\nrewards:\n  - ", reward,
            "\n  - {name: format, pattern: '.*1.*', weight: 0.5}\n");
    TrainRequest out{.config = name, .yaml = yaml, .overrides = overrides};
    const std::string judge = reward.substr(7, reward.find(',') - 7);
    for (const std::string& o :
         {std::string("eval.every=2"), std::string("eval.correct.threshold=0.5"),
          "eval.correct.reward=" + judge})
      out.overrides.push_back(o);
    return out;
  }
  TrainRequest resumed(const std::string& name) const { return {.resume = dir_.path(name)}; }
  RunResult train(const TrainRequest& request, const Callback& mine = values_of) {
    return run_training(
        request,
        {.reporter = recorder_, .stop = stop_, .callbacks = {.rewards = {{"mine", mine}}}});
  }
  // The step of the newest checkpoint.
  int64_t saved_step(const std::string& name) const {
    return load_state(find_checkpoint(dir_.path(name))).step;
  }
  void expect_equal_runs(const std::string& a, const std::string& b) const {
    for (const char* file : {"model.safetensors", "training/optimizer.safetensors"})
      EXPECT_TRUE(checkpoint_bytes(dir_.path(a), file) == checkpoint_bytes(dir_.path(b), file))
          << file;
  }
  TempDir dir_;
  Recorder recorder_;
  std::atomic<bool> stop_{false};
};

constexpr const char* kMine = "{name: mine, weight: 2}";

TEST_F(RewardCallbacks, GiveTheBitsOfTheSameProgram) {
  write_file(dir_.path("reward.py"), kProgram);
  for (const std::string ranks : {"1", "2"}) {
    SCOPED_TRACE(ranks);
    std::filesystem::remove(dir_.path("requests.txt"));
    const std::string name = "function" + ranks, program = "program" + ranks;
    std::mutex mutex;
    std::vector<std::string> asked;
    train(request(name, kMine, {"ranks=" + ranks}), [&](std::span<const Json> requests) {
      std::lock_guard lock(mutex);
      for (const Json& r : requests) asked.push_back(r.dump());
      const auto index = [](const Json& r) { return r.at("index").as_int(); };
      EXPECT_TRUE(std::ranges::is_sorted(requests, {}, index));
      return values_of(requests);
    });
    train_new(parse_plan(
        request(program, "{name: command, run: python3 reward.py, weight: 2, directory: " +
                             dir_.path("") + "}")
            .yaml,
        "program", request(program, "{name: command,", {"ranks=" + ranks}).overrides));
    expect_equal_runs(name, program);
    std::vector<std::string> sent;
    for (const Json& line : json_lines(dir_.path("requests.txt"))) sent.push_back(line.dump());
    std::ranges::sort(asked);
    std::ranges::sort(sent);
    EXPECT_EQ(asked, sent);
    EXPECT_GT(asked.size(), 4 * 24 + 3 * 8);
  }
  EXPECT_NE(read_file(dir_.path("function1/metrics.jsonl")).find("\"rewards/mine/mean\""),
            std::string::npos);
}

TEST_F(RewardCallbacks, StopOnRequestResumeAndReplay) {
  train(request("whole", kMine));
  EXPECT_EQ(recorder_.steps, (std::vector<int64_t>{1, 2, 3, 4}));
  EXPECT_EQ(recorder_.completions, json_lines(dir_.path("whole/completions.jsonl")).size());
  recorder_.on_step = [&](int64_t step) { stop_ = step == 2; };
  EXPECT_EQ(train(request("parts", kMine)).end, StageEnd::kInterrupted);
  EXPECT_EQ(saved_step("parts"), 2);
  EXPECT_NE(recorder_.messages.back().find("Resume with"), std::string::npos);
  recorder_.on_step = nullptr;
  stop_ = false;
  EXPECT_THROW_WITH(run_training(resumed("parts"), {.reporter = recorder_, .stop = stop_}),
                    InputError, "unknown reward");
  EXPECT_EQ(train(resumed("parts")).end, StageEnd::kFinished);
  expect_equal_runs("parts", "whole");
  // A replay asks no function.
  std::vector<std::string> lines;
  replay_run({.run = dir_.path("whole"), .step = 3},
             [&](const std::string& line) { lines.push_back(line); });
  ASSERT_FALSE(lines.empty());
  EXPECT_NE(lines.back().find("equal: 24 rollouts"), std::string::npos) << lines.back();
}

TEST_F(RewardCallbacks, ExceptionsEndTheRunAndKeepItsCheckpoint) {
  struct HostError : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  train(request("whole", kMine, {"ranks=2"}));
  for (const bool in_reporter : {false, true}) {
    const std::string name = in_reporter ? "reporter" : "function";
    SCOPED_TRACE(name);
    std::atomic<int64_t> done{0};
    recorder_.on_step = [&](int64_t step) {
      done = step;
      if (in_reporter && step == 3) throw HostError("my mistake");
    };
    const auto fails = [&](std::span<const Json> requests) {
      if (!in_reporter && requests[0].at("step").as_int() == 2 && done == 2 &&
          requests.size() == 12)
        throw HostError("my mistake");
      return values_of(requests);
    };
    EXPECT_THROW_WITH(train(request(name, kMine, {"ranks=2"}), fails), HostError, "my mistake");
    EXPECT_EQ(saved_step(name), in_reporter ? 3 : 2);
    EXPECT_NE(read_file(dir_.path(name + "/log.txt")).find("failed: my mistake"),
              std::string::npos);
    recorder_.on_step = nullptr;
    train(resumed(name));
    expect_equal_runs(name, "whole");
  }
}

TEST_F(RewardCallbacks, SayWhatIsWrong) {
  const auto mine = [&](const std::string& reward, const Callback& function) {
    train(request("wrong", reward), function);
  };
  EXPECT_THROW_WITH(mine(kMine, [](auto) { return std::vector<Json>{1.0}; }), InputError,
                    "reward mine: its function returned 1 answers to 3 requests");
  for (const double value : {std::nan(""), HUGE_VAL})
    EXPECT_THROW_WITH(
        mine(kMine, [&](auto requests) { return std::vector<Json>(requests.size(), value); }),
        InputError, str("reward mine: its function returned ", value, " for completion 0, '"));
  EXPECT_THROW_WITH(mine("{name: mime, weight: 2}", values_of), InputError,
                    "rewards[0] 'mime': unknown reward; known: code, command, ");
  EXPECT_THROW_WITH(mine("{name: mime, weight: 2}", values_of), InputError, "did you mean 'mine'");
  EXPECT_THROW_WITH(mine("{name: math, weight: 2}", values_of), InputError,
                    "rewards: no stage names the function 'mine'; hint: {name: mine}");
  EXPECT_THROW_WITH(mine("{name: mine, batch: true}", values_of), InputError,
                    "batch: this reward does not take it");
  EXPECT_THROW_WITH(
      run_training(request("wrong", kMine),
                   {.reporter = recorder_,
                    .stop = stop_,
                    .callbacks = {.rewards = {{"mine", values_of}, {"math", values_of}}}}),
      InputError, "the function 'math' has the name of a built-in one");
  EXPECT_FALSE(std::filesystem::exists(dir_.path("wrong")));
}

TEST_F(RewardCallbacks, AreAskedOnceUnderSeveralWeights) {
  std::map<int64_t, int> calls;  // calls with all completions: a step -> their number
  TrainRequest twice = request("twice", kMine);
  twice.yaml += "  - {name: mine, weight: -1}\n";
  train(twice, [&](std::span<const Json> requests) {
    if (requests.size() == 24) ++calls[requests[0].at("step").as_int()];
    return values_of(requests);
  });
  EXPECT_EQ(calls, (std::map<int64_t, int>{{0, 1}, {1, 1}, {2, 1}, {3, 1}}));
}

// Ends the dialogue with the third turn, or one with a 9.
constexpr const char* kEnvironment = R"(
import json, sys
for line in sys.stdin:
    r = json.loads(line)
    text, answer = r["completion"], {"index": r["index"], "turn": r["turn"]}
    if r["turn"] == 3 or "9" in text:
        answer |= {"done": True, "reward": text.count("1")}
    else:
        answer |= {"observation": "=%d+" % (sum(map(ord, text)) % 1000), "reward": 0.25 * len(text)}
    print(json.dumps(answer), flush=True)
)";

Json answer_to(const Json& request) {
  const std::string& text = request.at("completion").as_string();
  if (request.at("turn").as_int() == 3 || text.find('9') != text.npos)
    return Json().set("done", true).set("reward", std::ranges::count(text, '1'));
  int sum = 0;
  for (const char c : text) sum += c;
  return Json()
      .set("observation", str("=", sum % 1000, "+"))
      .set("reward", 0.25 * static_cast<double>(text.size()));
}

class EnvironmentCallbacks : public testing::Test {
 protected:
  // Trains in DIR/NAME with an environment.
  void train(const std::string& name, const std::string& environment, const std::string& ranks,
             const std::map<std::string, Callback>& callbacks) {
    const std::string yaml =
        str("model: {num_layers: 1, d_model: 16, num_heads: 2, context: 40, init_std: 0.1}\n"
            "num_threads: 1\ntrainer: grpo\nsteps: 3\nprompts_per_step: 4\nnum_generations: 6\n"
            "learning_rate: 1e-2\nmax_completion_length: 8\nstop_tokens: [2, 5, 8]\n"
            "eval: {every: 2, size: 8}\nrewards: [{name: environment}]\n",
            kSmallData, "output_dir: ", dir_.path(name), "\nenvironment: ", environment, "\n");
    run_training({.config = name, .yaml = yaml, .overrides = {"ranks=" + ranks}},
                 {.reporter = recorder_, .stop = stop_, .callbacks = {.environments = callbacks}});
  }
  TempDir dir_;
  Recorder recorder_;
  const std::atomic<bool> stop_{false};
};

TEST_F(EnvironmentCallbacks, GiveTheBitsOfTheSameProgram) {
  write_file(dir_.path("environment.py"), kEnvironment);
  for (const std::string ranks : {"1", "2"}) {
    SCOPED_TRACE(ranks);
    std::atomic<size_t> turns{0}, calls{0};
    train("function" + ranks, "{name: mine, discount: 0.5}", ranks,
          {{"mine", [&](std::span<const Json> requests) {
              turns += requests.size();
              ++calls;
              std::vector<Json> out;
              for (const Json& request : requests) out.push_back(answer_to(request));
              return out;
            }}});
    EXPECT_GT(calls, 3u);
    EXPECT_GT(turns, 2 * calls);  // in batches
    train("program" + ranks,
          str("{name: command, run: python3 environment.py, discount: 0.5, directory: ",
              dir_.path(""), "}"),
          ranks, {});
    for (const char* file : {"model.safetensors", "training/optimizer.safetensors"})
      EXPECT_TRUE(checkpoint_bytes(dir_.path("function" + ranks), file) ==
                  checkpoint_bytes(dir_.path("program" + ranks), file))
          << file;
    EXPECT_EQ(read_file(dir_.path("function" + ranks) + "/completions.jsonl"),
              read_file(dir_.path("program" + ranks) + "/completions.jsonl"));
    std::string last;
    replay_run({.run = dir_.path("function" + ranks), .step = 3},
               [&](const std::string& line) { last = line; });
    EXPECT_NE(last.find("equal: 24 rollouts"), std::string::npos) << last;
  }
}

TEST_F(EnvironmentCallbacks, SayWhatIsWrong) {
  const auto none = [](std::span<const Json>) { return std::vector<Json>{}; };
  const auto mistake = [](std::span<const Json>) -> std::vector<Json> {
    throw std::runtime_error("my mistake");
  };
  EXPECT_THROW_WITH(train("a", "{name: mine}", "1", {{"mine", none}}), InputError,
                    "environment: its function returned 0 answers to ");
  EXPECT_THROW_WITH(train("b", "{name: mine}", "2", {{"mine", mistake}}), std::runtime_error,
                    "my mistake");
  EXPECT_THROW_WITH(
      train("c", "{name: mime}", "1", {{"mine", none}}), InputError,
      "environment.name: unknown environment 'mime'; known: tools, http, command, mine; "
      "did you mean 'mine'?");
  EXPECT_THROW_WITH(train("c", "{name: mine, run: a}", "1", {{"mine", none}}), InputError,
                    "environment.");
  EXPECT_THROW_WITH(
      train("c", "{name: comand}", "1", {}), InputError,
      "unknown environment 'comand'; known: tools, http, command; did you mean 'command'?");
  EXPECT_THROW_WITH(
      train("c", "{name: comand, run: a}", "1", {}), InputError,
      "unknown environment 'comand'; known: tools, http, command; did you mean 'command'?");
  EXPECT_THROW_WITH(
      train("c", "{name: tools, tools: [calculator], tool_format: inline}", "1", {{"tools", none}}),
      InputError, "the function 'tools' has the name of a built-in one");
  EXPECT_FALSE(std::filesystem::exists(dir_.path("c")));
}

// As Python's dictionaries are given.
TEST(ParsePlan, TakesJsonAndCountsPathsFromTheCurrentFolder) {
  const RunPlan plan = parse_plan(
      "{\"trainer\": \"pretrain\", \"steps\": 3, \"learning_rate\": 1e-06, "
      "\"data\": {\"text\": \"\xc3\xa4.txt\", \"held_out_fraction\": 0.2}}",
      "mine", std::vector<std::string>{"steps=5"});
  EXPECT_EQ(plan.name, "mine");
  EXPECT_EQ(plan.stages[0].batch.steps, 5);
  EXPECT_EQ(plan.stages[0].optimizer.learning_rate, 1e-6);
  EXPECT_EQ(plan.stages[0].data.text[0],
            (std::filesystem::current_path() / "\xc3\xa4.txt").string());
  EXPECT_THROW_WITH(parse_plan("stepz: 3", "mine", {}), InputError, "mine:1");
}

}  // namespace
}  // namespace cohort::test
