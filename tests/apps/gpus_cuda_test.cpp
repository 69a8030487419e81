// `cohort train --gpus 2`: agreement with one GPU, and the end of a run when a rank is killed.
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <thread>

#include "tests/apps/process.h"
#include "tests/job/small_configs.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

// End of a run after a signal to the rank that is process `pid`.
struct SignalledRun {
  pid_t pid = 0;
  Output output;
  std::chrono::steady_clock::duration time{};
};

class CudaMultiGpuTrain : public testing::Test {
 protected:
  CudaMultiGpuTrain() { write_config(kSmallSft); }
  void write_config(const std::string& trainer) const {
    write_file(dir_.path("run.yaml"),
               std::string("output_dir: run\ndevice: cuda\n") + kSmallModel + kSmallData + trainer);
  }
  std::vector<std::string> train(std::vector<std::string> more) const {
    more.insert(more.begin(), {"train", dir_.path("run.yaml"), "--gpus", "2"});
    return more;
  }
  std::vector<Json> steps_of(const std::string& run) const {
    std::vector<Json> out;
    for (Json& line : json_lines(dir_.path(run) + "/metrics.jsonl"))
      if (line.find("eval") == nullptr) out.push_back(std::move(line));
    return out;
  }
  // Starts a run that would not end by itself, signals the rank, and waits for the run.
  void signal_rank(int victim, int number, SignalledRun& out) const;
  TempDir dir_;
};

// Finds the process that a launcher started for `config` and `rank`, by its command line and
// environment. -1 if there is none.
pid_t rank_process(const std::string& config, int rank) {
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    try {
      const std::string command = read_file(entry.path().string() + "/cmdline");
      const std::string environment = read_file(entry.path().string() + "/environ");
      const std::string wanted = str('\0', "RANK=", rank, '\0');
      if (command.find(config) != std::string::npos &&
          ('\0' + environment).find(wanted) != std::string::npos)
        return std::stoi(name);
    } catch (const std::exception&) {
      // The process has ended, or belongs to another user.
    }
  }
  return -1;
}

struct Training {
  const char* name;
  std::string config;
  const char* dtype;
  size_t steps;
  double weights, loss, grad_norm;  // tolerances: relative, absolute, relative
};

void PrintTo(const Training& training, std::ostream* out) {
  *out << training.name;
}

// Two GPUs add the f32 gradients of a step in another order than one: errors of a few units of
// 2^-24 = 6e-8 of the largest summands, which AdamW may amplify where summands cancel. adam_eps is
// raised to 1e-3 so that such elements stay small (see tests/job/ranks_test.cpp, where the
// CPU's tolerance is 1e-6). The order of blocks on a GPU differs too, so the tolerance is ten times
// that.
//
// In bf16 the f32 masters differ as little, but near a rounding boundary the bf16 weight differs by
// one unit, 2^-8 of it. Even if every fourth weight did, the overall error would be 2^-9. Different
// weights may sample different tokens, after which the runs diverge, so both updates of GRPO use
// samples of the same weights.
//
// A rank that is omitted, counted twice or not averaged changes the weights by more than 1e-1.
class CudaMultiGpuTrainings : public CudaMultiGpuTrain,
                              public testing::WithParamInterface<Training> {};

TEST_P(CudaMultiGpuTrainings, OnTwoGpusMatchOneAndRepeatToTheBit) {
  COHORT_REQUIRE_GPUS(2);
  const Training& t = GetParam();
  write_config(t.config);
  for (const auto& [name, gpus, sharding] : {std::tuple{"one", "1", "none"},
                                             {"two", "2", "optimizer"},
                                             {"again", "2", "none"},
                                             {"gradients", "2", "gradients"},
                                             {"full", "2", "full"}}) {
    const Output output =
        run_cohort({"train", dir_.path("run.yaml"), "--gpus", gpus, "output_dir=" + dir_.path(name),
                    "adam_eps=1e-3", str("dtype=", t.dtype), str("steps=", t.steps),
                    str("sharding=", sharding)});
    ASSERT_EQ(output.code, 0) << output.err;
  }
  for (const char* name : {"again", "gradients", "full"})  // one micro batch a rank
    EXPECT_TRUE(checkpoint_bytes(dir_.path(name)) == checkpoint_bytes(dir_.path("two"))) << name;
  EXPECT_LT(relative_error(final_weights(dir_.path("two")), final_weights(dir_.path("one"))),
            t.weights);
  const auto one = steps_of("one"), two = steps_of("two"), again = steps_of("again");
  ASSERT_EQ(one.size(), t.steps);
  ASSERT_EQ(two.size(), t.steps);
  ASSERT_EQ(again.size(), t.steps);
  for (size_t i = 0; i < t.steps; ++i) {
    EXPECT_NEAR(metric(two[i], "loss"), metric(one[i], "loss"), t.loss) << i;
    EXPECT_NEAR(metric(two[i], "grad_norm"), metric(one[i], "grad_norm"),
                t.grad_norm * metric(one[i], "grad_norm"))
        << i;
    for (const char* name : {"loss", "grad_norm"})
      EXPECT_EQ(metric(again[i], name), metric(two[i], name)) << name << " " << i;
  }
}

const std::string kTwoUpdates = std::string(kSmallGrpo) + "num_iterations: 2\n";

INSTANTIATE_TEST_SUITE_P(
    Trainers, CudaMultiGpuTrainings,
    testing::Values(Training{"sft_f32", kSmallSft, "f32", 6, 1e-5, 1e-4, 1e-4},
                    Training{"sft_bf16", kSmallSft, "bf16", 6, 2e-3, 2e-2, 2e-2},
                    Training{"grpo_f32", kSmallGrpo, "f32", 4, 1e-5, 1e-4, 1e-4},
                    Training{"grpo_bf16", kTwoUpdates, "bf16", 1, 2e-3, 2e-2, 2e-2}),
    [](const auto& info) { return std::string(info.param.name); });

void CudaMultiGpuTrain::signal_rank(int victim, int number, SignalledRun& out) const {
  const std::string run = dir_.path(str("run", victim));
  Process launcher(train({"steps=100000000", "output_dir=" + run}));
  ASSERT_TRUE(wait_for_path(run + "/metrics.jsonl", launcher));
  std::this_thread::sleep_for(std::chrono::seconds(1));
  out.pid = rank_process(dir_.path("run.yaml"), victim);
  ASSERT_GT(out.pid, 0);
  const auto start = std::chrono::steady_clock::now();
  kill(out.pid, number);
  out.output = launcher.wait();
  out.time = std::chrono::steady_clock::now() - start;
}

TEST_F(CudaMultiGpuTrain, AKilledRankEndsTheRunWithinThirtySeconds) {
  COHORT_REQUIRE_GPUS(2);
  for (const int victim : {1, 0}) {
    SCOPED_TRACE(victim);
    SignalledRun run;
    ASSERT_NO_FATAL_FAILURE(signal_rank(victim, SIGKILL, run));
    const Output& output = run.output;
    EXPECT_LT(run.time, std::chrono::seconds(30));
    EXPECT_EQ(output.code, 128 + SIGKILL) << output.err;
    EXPECT_NE(output.err.find(str("rank ", victim, " (")), std::string::npos) << output.err;
    EXPECT_NE(output.err.find("ended without a message"), std::string::npos) << output.err;
    EXPECT_NE(output.err.find(str("rank ", victim, " was terminated by signal 9")),
              std::string::npos)
        << output.err;
  }
}

// tests/distributed has the kernel that spins; here a rank is stopped, or asleep in a reward.
TEST_F(CudaMultiGpuTrain, AStoppedRankIsNamed) {
  COHORT_REQUIRE_GPUS(2);
  for (const int victim : {1, 0}) {
    SCOPED_TRACE(victim);
    SignalledRun run;
    ASSERT_NO_FATAL_FAILURE(signal_rank(victim, SIGSTOP, run));
    const Output& output = run.output;
    EXPECT_LT(run.time, std::chrono::seconds(90));
    EXPECT_NE(output.code, 0);
    EXPECT_NE(output.err.find(str("rank ", victim, " (")), std::string::npos) << output.err;
    EXPECT_NE(output.err.find(str("pid ", run.pid, ") sent no heartbeat for 20 s")),
              std::string::npos)
        << output.err;
  }
}

TEST_F(CudaMultiGpuTrain, AStopOfTenSecondsIsNoFailure) {
  COHORT_REQUIRE_GPUS(2);
  Process launcher(train({"steps=3000", "output_dir=" + dir_.path("run")}));
  ASSERT_TRUE(wait_for_path(dir_.path("run") + "/metrics.jsonl", launcher));
  const pid_t pid = rank_process(dir_.path("run.yaml"), 1);
  ASSERT_GT(pid, 0);
  kill(pid, SIGSTOP);
  std::this_thread::sleep_for(std::chrono::seconds(10));
  kill(pid, SIGCONT);
  const Output output = launcher.wait();
  EXPECT_EQ(output.code, 0) << output.err;
}

TEST_F(CudaMultiGpuTrain, ARankAsleepInARewardIsNamed) {
  COHORT_REQUIRE_GPUS(2);
  for (const int victim : {1, 0}) {
    SCOPED_TRACE(victim);
    write_file(dir_.path("reward.sh"),
               str("n=0\nwhile IFS= read -r line; do\n"
                   "  n=$((n + 1))\n"
                   "  if [ \"$RANK\" = ",
                   victim,
                   " ] && [ $n -gt 21 ]; then sleep 1000; fi\n"
                   "  i=$(printf '%s' \"$line\" | sed 's/.*\"index\": *\\([0-9]*\\).*/\\1/')\n"
                   "  echo '{\"index\": '$i', \"reward\": '$((n % 2))'}'\n"
                   "done\n"));
    write_config(
        "trainer: grpo\nprompts_per_step: 4\nnum_generations: 6\nrewards:\n  - {name: "
        "command, run: sh reward.sh, workers: 1, timeout: 1000}\n");
    const auto start = std::chrono::steady_clock::now();
    const Output output = run_cohort(train({"steps=100000000", "watchdog_minutes=0.25",
                                            "output_dir=" + dir_.path(str("asleep", victim))}));
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(90));
    EXPECT_EQ(output.code, 4) << output.err;
    EXPECT_NE(output.err.find(str("rank ", victim, " (")), std::string::npos) << output.err;
    EXPECT_NE(output.err.find(") has made no progress for 15 s: waiting for rewards, after call"),
              std::string::npos)
        << output.err;
  }
}

TEST_F(CudaMultiGpuTrain, AnInterruptIsForwardedAndTheRunResumesToTheBit) {
  COHORT_REQUIRE_GPUS(2);
  const Output whole = run_cohort(train({"steps=1000", "output_dir=" + dir_.path("whole")}));
  ASSERT_EQ(whole.code, 0) << whole.err;
  Process launcher(train({"steps=1000", "output_dir=" + dir_.path("run")}));
  const std::string metrics = dir_.path("run/metrics.jsonl");
  ASSERT_TRUE(wait_for_path(metrics, launcher));
  while (read_file(metrics).find("\"loss\"") == std::string::npos && launcher.running())
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  launcher.signal(SIGINT);
  const Output interrupted = launcher.wait();
  ASSERT_EQ(interrupted.code, 130) << interrupted.err;
  EXPECT_NE(interrupted.out.find("interrupted; saved"), std::string::npos) << interrupted.out;
  EXPECT_LT(steps_of("run").size(), 1000u);
  const Output resumed = run_cohort({"train", "--gpus", "2", "--resume", dir_.path("run")});
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_EQ(steps_of("run").size(), 1000u);
  EXPECT_TRUE(checkpoint_bytes(dir_.path("run")) == checkpoint_bytes(dir_.path("whole")));
}

}  // namespace
}  // namespace cohort::test
