// Runs whose reward is a program of the user's.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "tests/apps/process.h"
#include "tests/trainers/small_configs.h"

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

TEST_F(RewardPrograms, GiveTheWeightsOfTheBuiltInReward) {
  const Output built_in = run_cohort(run("built_in", "{name: format, pattern: '.*1.*'}"));
  ASSERT_EQ(built_in.code, 0) << built_in.err;
  // Answers come late, and not in the order of the requests.
  const Output own = run_cohort(run("own", python("import random, time\n"
                                                  "def reward(completions, **fields):\n"
                                                  "    time.sleep(random.random() / 100)\n"
                                                  "    return ['1' in c for c in completions]\n")));
  ASSERT_EQ(own.code, 0) << own.err;
  EXPECT_EQ(checkpoint_bytes(dir_.path("own")), checkpoint_bytes(dir_.path("built_in")));
  const Json line = json_lines(dir_.path("own/metrics.jsonl")).at(1);
  EXPECT_EQ(metric(line, "rewards/command/failed"), 0);
  // Relative paths stay those of the file, also in a resumed run, and their output is in the log.
  write_file(
      dir_.path("reward.py"),
      "print('resumed')\ndef reward(completions, **fields): return [0] * len(completions)\n");
  EXPECT_EQ(run_cohort({"train", "--resume", dir_.path("own"), "steps=5"}).code, 0);
  EXPECT_NE(read_file(dir_.path("own/rewards.log")).find("resumed"), std::string::npos);
}

TEST_F(RewardPrograms, ThatFailTooOftenEndTheRun) {
  const std::string often = python(
      "def reward(completions, **fields):\n"
      "    if len(completions[0]) % 2: raise ValueError('odd')\n"
      "    return [1]\n");
  const Output output = run_cohort(run("often", often));
  EXPECT_EQ(output.code, 1);
  EXPECT_NE(output.err.find("it says: 'ValueError('odd')'"), std::string::npos) << output.err;
  EXPECT_NE(output.err.find("rewards.log"), std::string::npos);
  expect_bad_input(run_cohort(run("none", "{name: command, run: no-such-program}")),
                   {"cannot run 'no-such-program': No such file or directory"});
}

TEST_F(RewardPrograms, LeaveWithTheRunHoweverItEnds) {
  for (const int signal : {SIGKILL, SIGTERM}) {
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
      // The host of the programs kills them when it sees that the run has gone.
      for (int i = 0; i < 2000 && ::kill(id, 0) == 0; ++i) usleep(1000);
      EXPECT_NE(::kill(id, 0), 0) << id;
    }
    EXPECT_GE(count, 2);
  }
}

TEST_F(RewardPrograms, TheExampleTrains) {
  const Output output =
      run_cohort({"train", (kRoot / "examples/python_reward/config.yaml").string(), "steps=2",
                  "eval.size=4", "output_dir=" + dir_.path("example")});
  EXPECT_EQ(output.code, 0) << output.err;
}

}  // namespace
}  // namespace cohort::test
