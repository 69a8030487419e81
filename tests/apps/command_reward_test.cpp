// Runs whose reward is a user's program.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "tests/apps/process.h"
#include "tests/job/small_configs.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

const fs::path kRoot = fs::path(__FILE__).parent_path().parent_path().parent_path();

class RewardPrograms : public testing::Test {
 protected:
  // A run whose only reward is `reward` (YAML).
  std::vector<std::string> run(const std::string& name, const std::string& reward,
                               std::vector<std::string> more = {}) const {
    write_file(dir_.path(name + ".yaml"),
               str(kSmallModel, kSmallData, "trainer: grpo\nsteps: 4\nprompts_per_step: 4\n",
                   "num_generations: 6\nlr_schedule: constant\nrewards:\n  - ", reward,
                   "\noutput_dir: ", name, "\n"));
    more.insert(more.begin(), {"train", dir_.path(name + ".yaml")});
    return more;
  }
  std::string python(const std::string& body) const {
    write_file(dir_.path("reward.py"), body);
    return "{name: command, run: python3 " + (kRoot / "scripts/cohort_reward.py").string() +
           " reward.py, workers: 2}";
  }
  TempDir dir_;
};

// `check` and the start of a run request rewards of the three printed examples, each with its
// answer.
TEST_F(RewardPrograms, ScoreThePrintedExamplesBeforeTheRun) {
  const std::vector<std::string> train =
      run("run", python("def reward(completions, **fields):\n"
                        "    with open('asked.txt', 'a') as log:\n"
                        "        log.writelines('%s=%s\\n' % (c, a) for c, a in\n"
                        "                       zip(completions, fields['answers']))\n"
                        "    return [float(c) for c in completions]\n"));
  const auto asked = [&] {
    std::vector<std::string> lines;
    std::istringstream in(read_file(dir_.path("asked.txt")));
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    return lines;
  };
  const Output output = run_cohort({"check", train[1]});
  ASSERT_EQ(output.code, 0) << output.err;
  const std::vector<std::string> first = asked();
  ASSERT_EQ(first.size(), 3u);
  for (const std::string& line : first) {
    const std::string completion = line.substr(0, line.find('='));
    EXPECT_EQ(line, completion + "=" + completion);  // the gold answer
    EXPECT_NE(output.out.find(str("its rewards       command ", completion, "; total ")),
              std::string::npos)
        << output.out;
  }
  EXPECT_FALSE(first[0] == first[1] && first[1] == first[2]);
}

TEST_F(RewardPrograms, GiveTheWeightsOfTheBuiltInReward) {
  const Output built_in = run_cohort(run("built_in", "{name: format, pattern: '.*1.*'}"));
  ASSERT_EQ(built_in.code, 0) << built_in.err;
  // Answers are delayed, and not in the order of the requests.
  const Output custom =
      run_cohort(run("custom", python("import random, time\n"
                                      "def reward(completions, **fields):\n"
                                      "    time.sleep(random.random() / 100)\n"
                                      "    return ['1' in c for c in completions]\n")));
  ASSERT_EQ(custom.code, 0) << custom.err;
  EXPECT_EQ(checkpoint_bytes(dir_.path("custom")), checkpoint_bytes(dir_.path("built_in")));
  const Json line = json_lines(dir_.path("custom/metrics.jsonl")).at(1);
  EXPECT_EQ(metric(line, "rewards/command/failed"), 0);
  // Relative paths stay relative to the file in a resumed run, and the program's output is logged.
  write_file(
      dir_.path("reward.py"),
      "print('resumed')\ndef reward(completions, **fields): return [0] * len(completions)\n");
  EXPECT_EQ(run_cohort({"train", "--resume", dir_.path("custom"), "steps=5"}).code, 0);
  EXPECT_NE(read_file(dir_.path("custom/workers.log")).find("resumed"), std::string::npos);
}

// Each is bad input for `check` and for the start of a run, which leaves no directory.
TEST_F(RewardPrograms, ThatAreBrokenFailCheckAndTheStartOfARun) {
  const auto expect_broken = [&](const std::string& reward, const std::vector<std::string>& texts) {
    std::vector<std::string> train = run("run", reward);
    for (const char* command : {"check", "train"}) {
      train[0] = command;
      const Output output = run_cohort(train);
      EXPECT_EQ(output.code, 2) << output.err;
      EXPECT_EQ(output.err.rfind("cohort: rewards[0] '", 0), 0u) << output.err;
      for (const std::string& text : texts)
        EXPECT_NE(output.err.find(text), std::string::npos) << text << "\n" << output.err;
      EXPECT_FALSE(fs::exists(dir_.path("run")));
    }
  };
  const std::string good = "def reward(completions, **fields): return [1.0] * len(completions)\n";
  expect_broken(
      python("rewards = 1\n"),
      {"fails for 3 of 3 examples: it has ended", "(exit code 1); hint: ",
       "printed last:\n    reward.py: defines no function reward(completions, **fields)"});
  expect_broken(python("import no_such_module\n" + good),
                {"(exit code 1)", "\n    ModuleNotFoundError: No module named 'no_such_module'\n"});
  expect_broken(python("def reward(completions, **fields): return [fields['answer']]\n"),
                {"it reports: 'KeyError: 'answer''", "\n    KeyError: 'answer'\n"});
  expect_broken(python("def reward(completions, **fields): return ['high']\n"),
                {"it reports: 'ValueError: could not convert string to float: 'high''"});
  expect_broken("{name: command, run: python3 no_such_file.py}",
                {"(exit code 2)", "can't open file '"});
  fs::remove(dir_.path("reward.py"));
  expect_broken("{name: command, run: python3 " + (kRoot / "scripts/cohort_reward.py").string() +
                    " reward.py}",
                {"\n    reward.py: no such file in /"});
  expect_broken("{name: command, run: sleep 1000, timeout: 0.2, start_timeout: 0.2}",
                {"no answer in 0.2 s to its first request", "it printed no error\n"});
  expect_broken("{name: command, run: \"sh -c 'while read -r line; do echo 1; done'\"}",
                {"its answer is not an object"});
}

// A program that judges the evaluations of supervised training is tried, too.
TEST_F(RewardPrograms, ThatJudgeEvaluationsFailCheckWhereTheyAreBroken) {
  write_file(dir_.path("sft.yaml"), str(kSmallModel, kSmallData, kSmallSft, "rewards:\n  - ",
                                        python("raise SystemExit('out of luck')\n"), "\n"));
  EXPECT_EQ(run_cohort({"check", dir_.path("sft.yaml")}).code, 0);  // the task judges
  const Output output = run_cohort({"check", dir_.path("sft.yaml"), "eval.correct.reward=command"});
  EXPECT_EQ(output.code, 2);
  EXPECT_NE(output.err.find("\n    out of luck\n"), std::string::npos) << output.err;
}

TEST_F(RewardPrograms, ThatFailForOneExampleAreWarnedOf) {
  const std::vector<std::string> train =
      run("run", python("seen = []\n"
                        "def reward(completions, **fields):\n"
                        "    seen.append(1)\n"
                        "    return [1.0 if len(seen) > 1 else fields['answer']]\n"));
  const Output output = run_cohort({"check", train[1], "rewards.0.workers=1"});
  EXPECT_EQ(output.code, 0) << output.err;
  for (const char* text : {"' fails for 1 of 3 examples: it reports: 'KeyError: 'answer''",
                           "rewards: the last lines that programs printed:\n    Traceback "})
    EXPECT_NE(output.err.find(text), std::string::npos) << text << "\n" << output.err;
}

TEST_F(RewardPrograms, ThatFailAreCountedOverAllRanks) {
  const std::string fails = python(
      "import os\n"
      "def reward(completions, **fields):\n"
      "    if os.path.exists('run/log.txt'): raise ValueError('odd')\n"
      "    return [1]\n");
  const Output output = run_cohort(run("run", fails, {"ranks=2", "eval.at_start=no"}));
  EXPECT_EQ(output.code, 1);
  const std::string text = "reward command: no value for ";
  const size_t warning = output.err.find(text), last = output.err.rfind(text);
  ASSERT_NE(warning, std::string::npos) << output.err;
  EXPECT_EQ(output.err.find(text + "24 completions; "), warning) << output.err;
  EXPECT_EQ(output.err.find(text, warning + 1), last) << output.err;
}

TEST_F(RewardPrograms, ThatFailTooOftenEndTheRun) {
  const std::string often = python(
      "import os\n"
      "def reward(completions, **fields):\n"
      "    if os.path.exists('often/log.txt') and len(completions[0]) % 2:\n"
      "        raise ValueError('odd')\n"
      "    return [1]\n");
  const Output output = run_cohort(run("often", often));
  EXPECT_EQ(output.code, 1);
  EXPECT_NE(output.err.find("it reports: 'ValueError: odd'"), std::string::npos) << output.err;
  EXPECT_NE(output.err.find("workers.log"), std::string::npos);
  const std::string log = read_file(dir_.path("often/workers.log"));
  for (const char* text : {"Traceback (most recent call last):\n", "\nValueError: odd\n"})
    EXPECT_NE(log.find(text), std::string::npos) << log;
  expect_bad_input(run_cohort(run("none", "{name: command, run: no-such-program}")),
                   {"reward command: cannot run 'no-such-program': No such file or directory"});
}

// A run whose program works, then fails: its pass rates of before are kept.
TEST_F(RewardPrograms, ThatFailForAllProblemsEndEvalAndKeepPassRates) {
  const std::string good =
      "def reward(completions, **fields):\n    return [1.0 for c in completions]\n";
  std::vector<std::string> trained = run("run", python(good), {"eval.size=4", "steps=1"});
  trained.push_back("eval.correct.reward=command");
  Output output = run_cohort(trained);
  ASSERT_EQ(output.code, 0) << output.err;
  const std::string rates = dir_.path("rates.jsonl");
  output = run_cohort({"eval", dir_.path("run"), "--pass-rates", rates});
  ASSERT_EQ(output.code, 0) << output.err;
  const std::string before = read_file(rates);
  EXPECT_NE(before.find("\"pass_rate\":1"), std::string::npos) << before;
  python("raise SystemExit(3)\n");
  for (const char* samples : {"eval.num_samples=0", "eval.num_samples=2"})
    for (const bool writes : {true, false}) {
      std::vector<std::string> eval{"eval", dir_.path("run"), samples};
      if (writes) eval.insert(eval.end(), {"--pass-rates", rates});
      output = run_cohort(eval);
      EXPECT_EQ(output.code, 1);
      EXPECT_EQ(output.out, "");
      EXPECT_NE(output.err.find("cohort: reward command: no value for any problem"),
                std::string::npos)
          << output.err;
      EXPECT_EQ(read_file(rates), before);
    }
}

TEST_F(RewardPrograms, ThatEndByThemselvesDifferFromKilledOnes) {
  for (const auto& [end, how] :
       {std::pair("sys.exit('out of luck')",
                  "(exit code 1); the last line of workers.log: 'out of luck'"),
        {"os.kill(os.getpid(), 9)", "(signal 9)"}}) {
    const Output output =
        run_cohort(run("run", python(str("import os, sys\n"
                                         "def reward(completions, **fields):\n"
                                         "    if os.path.exists('run/log.txt'): ",
                                         end, "\n    return [1.0] * len(completions)\n"))));
    EXPECT_EQ(output.code, 1) << output.err;
    EXPECT_NE(output.err.find(str("it has ended, or closed its output ", how)), output.err.npos)
        << output.err;
    fs::remove_all(dir_.path("run"));
  }
}

TEST_F(RewardPrograms, FindTheirModulesThroughALink) {
  fs::create_directory(dir_.path("real"));
  write_file(dir_.path("real/reward.py"),
             "import beside_the_file\nimport beside_the_link\n"
             "def reward(completions, **fields): return [1.0] * len(completions)\n");
  write_file(dir_.path("real/beside_the_file.py"), "");
  write_file(dir_.path("beside_the_link.py"), "");
  const std::string reward = python("");
  fs::remove(dir_.path("reward.py"));
  fs::create_symlink("real/reward.py", dir_.path("reward.py"));
  const Output output = run_cohort({"check", run("run", reward)[1]});
  EXPECT_EQ(output.code, 0) << output.err;
  EXPECT_NE(output.out.find("its rewards       command 1; total 1"), std::string::npos)
      << output.out << output.err;
}

TEST_F(RewardPrograms, EndWithTheRunHoweverItEnds) {
  for (const int signal : {SIGKILL, SIGTERM, SIGINT}) {
    const std::string pids = dir_.path(str("pids", signal));
    const std::string reward = python(
        "import os, time\n"
        "open('" +
        pids +
        "', 'a').write(f'{os.getpid()}\\n')\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    open('" +
        pids +
        "', 'a').write(f'{os.getpid()}\\n')\n"
        "    time.sleep(1000)\n"
        "def reward(completions, **fields):\n"
        "    return [1.0] * len(completions)\n");
    Process process(run(str("run", signal), reward, {"steps=1000000", "eval.at_start=false"}));
    ASSERT_TRUE(wait_for_path(pids, process));
    const auto started = [&] {
      const std::string lines = read_file(pids);
      return std::count(lines.begin(), lines.end(), '\n');
    };
    while (started() < 2 && process.running()) usleep(1000);
    process.signal(signal);
    process.wait();
    std::ifstream file(pids);
    int count = 0;
    for (pid_t id; file >> id; ++count) {
      // The host process of the programs kills them after the run ends.
      for (int i = 0; i < 2000 && ::kill(id, 0) == 0; ++i) usleep(1000);
      EXPECT_NE(::kill(id, 0), 0) << id;
    }
    EXPECT_GE(count, 2);
  }
}

// Five of the 256 completions of a step fail, chosen by index and step; four others are scored by
// programs that leave child processes. With the argument `polite` the five return an error only.
constexpr const char* kFaults = R"(
import json, os, signal, sys, time
polite = sys.argv[1] == "polite"
def child(detached):
    if os.fork(): return
    if detached: os.setsid()
    os.closerange(0, 3)
    time.sleep(1000)
for line in sys.stdin:
    one = json.loads(line)
    index = one["index"]
    rank = (index * 37 + one["step"] * 11) % 256
    answer = json.dumps({"index": index, "reward": float("1" in one["completion"])})
    if rank < 5 and polite: answer = json.dumps({"index": index, "error": "no"})
    elif rank < 5:
        kind = (rank + one["step"]) % 16
        if kind == 0: time.sleep(1000)
        elif kind == 1: os.kill(os.getpid(), signal.SIGSEGV)
        elif kind == 2: child(False), os._exit(2)
        elif kind == 3: child(True), os._exit(3)
        elif kind == 4: sys.stdout.write("x" * 3000000)
        elif kind == 5: sys.stderr.write("y" * 3000000), os._exit(5)
        elif kind == 6: answer += "\n" + answer
        elif kind == 7: answer = json.dumps({"index": index + 1, "reward": 1})
        elif kind == 8: answer = '{"index": %d, "reward": NaN}' % index
        elif kind == 9: answer = '{"index": %d, "reward": 1e999}' % index
        elif kind == 10: answer = '{"index": %d, "reward": true}' % index
        elif kind == 11: os.close(0), os.close(1), time.sleep(1000)
        elif kind == 12: sys.stdout.write(answer), sys.stdout.flush(), os._exit(0)
        elif kind == 13: answer = "[" * 100000
        elif kind == 14: answer = json.dumps([json.loads(answer)])
        elif kind == 15: os.kill(0, signal.SIGKILL)
    elif rank < 9 and not polite: child(rank % 2)
    sys.stdout.write(answer + "\n")
    sys.stdout.flush()
)";

using RewardProgramsSlow = RewardPrograms;

// 10,240 completions, 200 failures of all kinds.
TEST_F(RewardProgramsSlow, ThatFailInEveryWayChangeTheWeightsByTheirValuesOnly) {
  write_file(dir_.path("faults.py"), kFaults);
  const auto train = [&](const std::string& how) {
    const std::string reward = "{name: command, run: python3 -I -S " + dir_.path("faults.py") +
                               " " + how + ", workers: 4, timeout: 2}";
    const Output output = run_cohort(
        run(how, reward,
            {"steps=40", "prompts_per_step=16", "num_generations=16", "eval.at_start=false"}));
    EXPECT_EQ(output.code, 0) << output.err;
    int steps = 0;
    for (const Json& line : json_lines(dir_.path(how + "/metrics.jsonl")))
      if (line.find("rewards/command/failed") != nullptr) {
        ++steps;
        EXPECT_EQ(metric(line, "rewards/command/failed"), 5) << how << ", step " << steps;
      }
    EXPECT_EQ(steps, 40);
    return checkpoint_bytes(dir_.path(how));
  };
  EXPECT_EQ(train("rude"), train("polite"));
  for (const auto& entry : fs::directory_iterator("/proc")) {
    std::ifstream file(entry.path() / "cmdline");
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    EXPECT_EQ(text.find(dir_.path("faults.py")), std::string::npos) << entry.path();
  }
}

TEST_F(RewardPrograms, GiveTheSameWeightsOnTwoRanks) {
  const std::string custom = python(
      "import random, time\n"
      "def reward(completions, **fields):\n"
      "    time.sleep(random.random() / 100)\n"
      "    return ['1' in c for c in completions]\n");
  const Output built_in =
      run_cohort(run("built_in", "{name: format, pattern: '.*1.*'}", {"ranks=2"}));
  ASSERT_EQ(built_in.code, 0) << built_in.err;
  const Output two = run_cohort(run("two", custom, {"ranks=2"}));
  ASSERT_EQ(two.code, 0) << two.err;
  EXPECT_EQ(checkpoint_bytes(dir_.path("two")), checkpoint_bytes(dir_.path("built_in")));
}

TEST_F(RewardPrograms, TheExampleTrains) {
  const Output output =
      run_cohort({"train", (kRoot / "examples/python_reward/config.yaml").string(), "steps=2",
                  "eval.size=4", "output_dir=" + dir_.path("example")});
  EXPECT_EQ(output.code, 0) << output.err;
}

}  // namespace
}  // namespace cohort::test
