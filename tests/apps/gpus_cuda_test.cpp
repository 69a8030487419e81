// `cohort train --gpus 2`: as one rank of one process, and what happens when a rank is killed.
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <thread>

#include "tests/apps/process.h"
#include "tests/trainers/small_configs.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

class CudaMultiGpuTrain : public testing::Test {
 protected:
  CudaMultiGpuTrain() {
    write_file(dir_.path("run.yaml"), std::string("output_dir: run\ndevice: cuda\n") + kSmallModel +
                                          kSmallData + kSmallSft);
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
  TempDir dir_;
};

// The process that trains `config` as `rank`, started by a launcher: the one process with that
// configuration and that rank in its environment. -1 if there is none.
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
      // It has ended meanwhile, or belongs to another user.
    }
  }
  return -1;
}

TEST_F(CudaMultiGpuTrain, TwoGpusTrainAsOne) {
  COHORT_REQUIRE_GPUS(2);
  const Output two = run_cohort(train({"output_dir=" + dir_.path("two"), "adam_eps=1e-3"}));
  ASSERT_EQ(two.code, 0) << two.err;
  const Output again = run_cohort(train({"output_dir=" + dir_.path("again"), "adam_eps=1e-3"}));
  ASSERT_EQ(again.code, 0) << again.err;
  const Output one = run_cohort(
      {"train", dir_.path("run.yaml"), "output_dir=" + dir_.path("one"), "adam_eps=1e-3"});
  ASSERT_EQ(one.code, 0) << one.err;
  const auto a = steps_of("two"), b = steps_of("one"), c = steps_of("again");
  ASSERT_EQ(a.size(), b.size());
  ASSERT_EQ(a.size(), c.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_NEAR(metric(a[i], "loss"), metric(b[i], "loss"), 1e-4);
    EXPECT_EQ(metric(a[i], "loss"), metric(c[i], "loss"));
    EXPECT_EQ(metric(a[i], "grad_norm"), metric(c[i], "grad_norm"));
  }
}

TEST_F(CudaMultiGpuTrain, AKilledRankEndsTheRunWithinThirtySeconds) {
  COHORT_REQUIRE_GPUS(2);
  for (const int victim : {1, 0}) {
    SCOPED_TRACE(victim);
    Process launcher(train({"steps=100000000", "output_dir=" + dir_.path(str("run", victim))}));
    ASSERT_TRUE(wait_for_path(dir_.path(str("run", victim)) + "/metrics.jsonl", launcher));
    std::this_thread::sleep_for(std::chrono::seconds(1));
    const pid_t pid = rank_process(dir_.path("run.yaml"), victim);
    ASSERT_GT(pid, 0);
    const auto start = std::chrono::steady_clock::now();
    kill(pid, SIGKILL);
    const Output output = launcher.wait();
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
    EXPECT_EQ(output.code, 128 + SIGKILL) << output.err;
    EXPECT_NE(output.err.find(str("rank ", victim, " (")), std::string::npos) << output.err;
    EXPECT_NE(output.err.find("ended without a word"), std::string::npos) << output.err;
    EXPECT_NE(output.err.find(str("rank ", victim, " was ended by signal 9")), std::string::npos)
        << output.err;
  }
}

TEST_F(CudaMultiGpuTrain, AnInterruptIsPassedOnAndTheRunResumes) {
  COHORT_REQUIRE_GPUS(2);
  Process launcher(train({"steps=100000", "output_dir=" + dir_.path("run")}));
  ASSERT_TRUE(wait_for_path(dir_.path("run/metrics.jsonl"), launcher));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  launcher.signal(SIGINT);
  const Output interrupted = launcher.wait();
  EXPECT_EQ(interrupted.code, 130) << interrupted.err;
  EXPECT_NE(interrupted.out.find("interrupted; saved"), std::string::npos) << interrupted.out;
  const auto steps = steps_of("run");
  ASSERT_FALSE(steps.empty());
  const auto done = static_cast<int64_t>(metric(steps.back(), "step"));
  const Output resumed =
      run_cohort({"train", "--gpus", "2", "--resume", dir_.path("run"), str("steps=", done + 3)});
  EXPECT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_EQ(static_cast<int64_t>(metric(steps_of("run").back(), "step")), done + 3);
}

}  // namespace
}  // namespace cohort::test
