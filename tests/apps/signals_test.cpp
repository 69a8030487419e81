// Commands that are interrupted, or whose output has no reader.
#include <signal.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <thread>

#include "tests/apps/process.h"
#include "tests/job/small_configs.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

// Longer than the slowest machine needs to handle a signal.
constexpr std::chrono::seconds kTimeout{60};

bool wait_until(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + kTimeout;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

size_t count(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = text.find(part); at != text.npos; at = text.find(part, at + 1)) ++n;
  return n;
}

class Signals : public testing::Test {
 protected:
  void SetUp() override {
    write_file(dir_.path("run.yaml"),
               "output_dir: run\n" + std::string(kSmallModel) + kSmallData + kSmallSft);
  }
  std::vector<std::string> train(std::vector<std::string> more) const {
    more.insert(more.begin(), {"train", dir_.path("run.yaml")});
    return more;
  }
  // Runs a shell command with $COHORT, the binary, and $RUN, the run directory. Returns its output.
  std::string shell(const std::string& command) const {
    write_file(dir_.path("command.sh"),
               str("COHORT=", COHORT_BINARY, "\nRUN=", run_, "\ncd ", dir_.path(), "\n", command));
    EXPECT_EQ(
        std::system(str("bash ", dir_.path("command.sh"), " > ", dir_.path("output")).c_str()), 0);
    return read_file(dir_.path("output"));
  }
  TempDir dir_;
  const std::string run_ = dir_.path("run");
};

const char* kSavingMessage = "cohort: saving at the end of this step; press Ctrl-C again";
const char* kWaitMessage = "please wait; press Ctrl-C once more";

TEST_F(Signals, AreAcknowledgedAtOnceAndTheThirdEndsTheProcess) {
  for (const int signal : {SIGINT, SIGTERM}) {
    // One step takes far longer than this test.
    Process process(train({"batch_size=1000000"}));
    // An evaluation before the step saves the run.
    ASSERT_TRUE(wait_for_path(run_ + "/checkpoints/best", process));
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    process.signal(signal);
    EXPECT_TRUE(wait_until([&] { return count(process.err(), kSavingMessage) == 1; }));
    process.signal(signal);
    EXPECT_TRUE(wait_until([&] { return count(process.err(), kWaitMessage) == 1; }));
    EXPECT_TRUE(process.running());
    process.signal(signal);
    const Output output = process.wait();
    EXPECT_EQ(output.code, 128 + signal);
    EXPECT_EQ(count(output.err, "cohort: "), 2u) << output.err;
    EXPECT_EQ(shell("ls $RUN/checkpoints"), "best\nstep-00000000\n");
    fs::remove_all(run_);
  }
}

// A reward program that does not answer, and a long evaluation.
TEST_F(Signals, EndTheProcessAtOnceBeforeTheFirstStep) {
  write_file(
      dir_.path("grpo.yaml"),
      str("output_dir: run\n", kSmallModel, kSmallData,
          "trainer: grpo\nsteps: 4\nprompts_per_step: 4\nnum_generations: 6\nrewards:\n",
          "  - {name: command, run: \"sh -c 'echo $$ > reward.tmp; mv reward.tmp reward.pid;",
          " sleep 1000'\", start_timeout: 1000}\n"));
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    Process waiting({"train", dir_.path("grpo.yaml")});
    ASSERT_TRUE(wait_for_path(dir_.path("reward.pid"), waiting));
    const pid_t program = std::stoi(read_file(dir_.path("reward.pid")));
    Process evaluating(train({"eval.num_samples=4096", "eval.k=[1]", "max_completion_length=12"}));
    ASSERT_TRUE(wait_for_path(run_ + "/metrics.jsonl", evaluating));
    for (Process* process : {&waiting, &evaluating}) {
      process->signal(signal);
      ASSERT_TRUE(wait_until([&] { return !process->running(); }));
      const Output output = process->wait();
      EXPECT_EQ(output.code, 128 + signal) << output.err;
      const char* message = "cohort: ended at once: there was nothing new to save\n";
      EXPECT_EQ(output.err.find("cohort: "),
                signal == SIGHUP ? std::string::npos : output.err.find(message))
          << output.err;
    }
    EXPECT_TRUE(wait_until([&] { return ::kill(program, 0) != 0; }));
    fs::remove_all(run_);
    fs::remove(dir_.path("reward.pid"));
  }
}

TEST_F(Signals, EndAnEvaluationAndSaveTheStepBeforeIt) {
  ASSERT_EQ(run_cohort(train({"eval.every=1", "output_dir=" + dir_.path("whole")})).code, 0);
  for (const int last : {1, 6}) {
    Process process(train({str("eval.every=", last == 1 ? 1 : 0), "eval.at_start=false",
                           "eval.num_samples=4096", "eval.k=[1]", "max_completion_length=12"}));
    const std::string metrics = run_ + "/metrics.jsonl";
    ASSERT_TRUE(wait_for_path(metrics, process));
    ASSERT_TRUE(wait_until([&] { return count(read_file(metrics), "\"loss\"") == size_t(last); }));
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    process.signal(SIGINT);
    ASSERT_TRUE(wait_until([&] { return !process.running(); }));
    const Output output = process.wait();
    EXPECT_EQ(output.code, 130) << output.err;
    EXPECT_EQ(count(output.err, "cohort: ending this evaluation, then saving"), 1u) << output.err;
    EXPECT_EQ(shell("ls $RUN/checkpoints"), str("step-0000000", last, "\n"));
    // The evaluation is made up for, also after a resume that was killed when it had logged it.
    write_file(metrics,
               read_file(metrics) + str("{\"step\":", last, ",\"eval\":true,\"pass@1\":1}\n"));
    const Output resumed =
        run_cohort({"train", "--resume", run_, "eval.every=1", "eval.num_samples=1"});
    EXPECT_EQ(resumed.code, 0) << resumed.err;
    EXPECT_EQ(count(read_file(metrics), "\"pass@1\":"), size_t(7 - last));
    EXPECT_TRUE(checkpoint_bytes(run_) == checkpoint_bytes(dir_.path("whole")));
    fs::remove_all(run_);
  }
}

TEST_F(Signals, RepeatedHangupsSave) {
  Process process(train({"steps=1000000"}));
  ASSERT_TRUE(wait_for_path(run_ + "/metrics.jsonl", process));
  ASSERT_TRUE(wait_until([&] { return count(read_file(run_ + "/metrics.jsonl"), "loss\"") > 2; }));
  for (int i = 0; i < 5; ++i) process.signal(SIGHUP);
  const Output output = process.wait();
  EXPECT_EQ(output.code, 130) << output.err;
  EXPECT_NE(output.out.find("cohort train --resume " + run_), std::string::npos) << output.out;
  EXPECT_EQ(output.err.find("cohort: "), std::string::npos) << output.err;
  EXPECT_NE(read_file(run_ + "/log.txt").find("interrupted; saved"), std::string::npos);
  EXPECT_LE(count(shell("ls $RUN/checkpoints"), "step-"), 2u);  // the first and the last
}

TEST_F(Signals, ARunUnderNohupIgnoresAHangup) {
  const auto before = ::signal(SIGHUP, SIG_IGN);
  Process process(train({"steps=40"}));
  ::signal(SIGHUP, before);
  ASSERT_TRUE(wait_for_path(run_ + "/metrics.jsonl", process));
  process.signal(SIGHUP);
  EXPECT_EQ(process.wait().code, 0);
}

TEST_F(Signals, CommandsWithNothingToSaveEndOnTheFirst) {
  ASSERT_EQ(run_cohort(train({})).code, 0);
  const std::vector<std::vector<std::string>> commands{
      {"generate", run_, "1+1=", "--num", "1000000"},
      {"eval", run_, "eval.num_samples=4096", "eval.k=[1]"},
      {"check", dir_.path("run.yaml")},
      {"gradcheck"}};
  for (const auto& command : commands)
    for (const int signal : {SIGINT, SIGTERM}) {
      Process process(command);
      if (!wait_until([&] { return !process.running() || process.ignores(SIGXFSZ); })) FAIL();
      process.signal(signal);
      const Output output = process.wait();
      EXPECT_TRUE(output.code == 130 || (output.code == 0 && command[0] == "check"))
          << command[0] << ": " << output.code;
      EXPECT_EQ(output.err, "");
    }
}

TEST_F(Signals, AClosedPipeIsAnErrorOfGenerate) {
  ASSERT_EQ(run_cohort(train({})).code, 0);
  const std::string printed = shell(
      "$COHORT generate $RUN 1+1= --num 5000 --json 2> err | head -1 > first\n"
      "echo ${PIPESTATUS[0]}; cat err");
  EXPECT_EQ(printed, "1\ncohort: cannot write to standard output: Broken pipe\n");
  EXPECT_EQ(count(read_file(dir_.path("first")), "\n"), 1u);
}

TEST_F(Signals, ARunContinuesAfterItsOutputPipeIsClosed) {
  shell("$COHORT train run.yaml 2>&1 steps=30 eval.every=5 | true");
  EXPECT_TRUE(fs::exists(run_ + "/checkpoints/step-00000030/manifest.json"));
  const std::string log = read_file(run_ + "/log.txt");
  EXPECT_NE(log.find("run: pass@1 (task) 0.00 -> "), std::string::npos) << log;
}

TEST_F(Signals, AFileAtItsSizeLimitIsAnError) {
  // The limit in KiB is above the log files and below the weights.
  const std::string printed = shell("(ulimit -f 8; $COHORT train run.yaml) 2>&1; echo code $?");
  EXPECT_NE(printed.find("cohort: "), std::string::npos) << printed;
  EXPECT_NE(printed.find("File too large"), std::string::npos) << printed;
  EXPECT_NE(printed.find("code 1\n"), std::string::npos) << printed;
}

}  // namespace
}  // namespace cohort::test
