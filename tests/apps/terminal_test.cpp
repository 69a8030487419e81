// Output of a run on a pseudo-terminal of a given width, and in the log file.
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <map>
#include <regex>

#include "tests/apps/process.h"
#include "tests/runs/small_configs.h"

namespace cohort::test {
namespace {

winsize columns(int n) {
  winsize size{};
  size.ws_row = 24;
  size.ws_col = static_cast<unsigned short>(n);
  return size;
}

// The successive contents of the progress line.
std::vector<std::string> bars(const std::string& output) {
  static const std::string kClear = "\r\033[K";
  std::vector<std::string> out;
  for (size_t at = output.find(kClear); at != std::string::npos; at = output.find(kClear, at)) {
    at += kClear.size();
    const std::string line = output.substr(at, output.find_first_of("\r\n", at) - at);
    if (line.starts_with("grpo ")) out.push_back(line);
  }
  return out;
}

// A `cohort` process on its own terminal.
class Terminal {
 public:
  Terminal(const std::vector<std::string>& arguments, int width) {
    std::vector<std::string> all{COHORT_BINARY};
    all.insert(all.end(), arguments.begin(), arguments.end());
    std::vector<char*> argv;
    for (std::string& a : all) argv.push_back(a.data());
    argv.push_back(nullptr);
    const winsize size = columns(width);
    pid_ = forkpty(&fd_, nullptr, nullptr, &size);
    if (pid_ < 0) throw Error("cannot make a pseudo-terminal");
    if (pid_ == 0) {
      execv(COHORT_BINARY, argv.data());
      _exit(127);
    }
  }
  ~Terminal() {
    if (status_ < 0) kill(pid_, SIGKILL), waitpid(pid_, &status_, 0);
    close(fd_);
  }
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  void resize(int width) const {
    const winsize size = columns(width);
    EXPECT_EQ(ioctl(fd_, TIOCSWINSZ, &size), 0);
  }
  // Reads until the output contains `text`, or to its end.
  const std::string& read_to(const std::string& text) {
    while (out_.find(text) == std::string::npos && read_some(-1)) continue;
    return out_;
  }
  // Reads the available output, without waiting.
  const std::string& read_available() {
    while (read_some(0)) continue;
    return out_;
  }
  // Reads until the progress line has been written `n` times, or to the end.
  std::vector<std::string> read_bars(size_t n) {
    while (bars(out_).size() < n && read_some(-1)) continue;
    return bars(out_);
  }
  const std::string& read_all() {
    while (read_some(-1)) continue;
    return out_;
  }
  int wait() {
    waitpid(pid_, &status_, 0);
    return WIFEXITED(status_) ? WEXITSTATUS(status_) : 128 + WTERMSIG(status_);
  }

 private:
  bool read_some(int timeout) {
    pollfd ready{.fd = fd_, .events = POLLIN, .revents = 0};
    if (poll(&ready, 1, timeout) <= 0) return false;
    char buffer[4096];
    const ssize_t n = read(fd_, buffer, sizeof buffer);
    if (n > 0) out_.append(buffer, static_cast<size_t>(n));
    return n > 0;
  }

  int fd_ = -1, status_ = -1;
  pid_t pid_ = -1;
  std::string out_;
};

int64_t step_of(const std::string& bar) {
  return std::stoll(bar.substr(5));
}

class Progress : public testing::Test {
 protected:
  void SetUp() override {
    write_file(dir_.path("run.yaml"),
               "output_dir: run\n" + std::string(kSmallModel) + kSmallData + kSmallGrpo);
  }
  std::vector<std::string> train(int64_t steps) const {
    return {"train", dir_.path("run.yaml"), str("steps=", steps), "eval.every=100"};
  }
  // Expects complete parts, and the numbers that the run has logged.
  void expect_complete(const std::vector<std::string>& shown) const {
    static const std::regex kForm(
        "grpo \\d+/\\d+( \\[#*\\.*\\])?( [0-9:]+ elapsed(, [0-9:]+ left)?)?"
        "((  (loss|reward|no-signal|entropy|tokens/s) \\S+)*)");
    static const std::regex kReward("  reward (\\S+)");
    std::map<int64_t, double> rewards;
    for (const Json& line : json_lines(run_ + "/metrics.jsonl"))
      if (line.find("reward") != nullptr)
        rewards[line.at("step").as_int()] = metric(line, "reward");
    for (const std::string& bar : shown) {
      EXPECT_TRUE(std::regex_match(bar, kForm)) << bar;
      std::smatch match;
      if (!std::regex_search(bar, match, kReward)) continue;
      char text[32];
      std::snprintf(text, sizeof text, "%.4g", rewards.at(step_of(bar)));
      EXPECT_EQ(match[1].str(), text) << bar;
    }
  }
  TempDir dir_;
  const std::string run_ = dir_.path("run");
};

TEST_F(Progress, NeverReachesTheLastColumn) {
  for (const int width : {200, 80, 60, 40, 12, 5}) {
    Terminal terminal(train(150), width);
    const std::vector<std::string> shown = bars(terminal.read_all());
    EXPECT_EQ(terminal.wait(), 0);
    EXPECT_EQ(shown.empty(), width == 5);
    for (const std::string& bar : shown) EXPECT_LT(bar.size(), static_cast<size_t>(width)) << bar;
    expect_complete(shown);
    if (shown.empty()) continue;
    EXPECT_EQ(shown.back().find("tokens/s") != std::string::npos, width == 200) << shown.back();
    EXPECT_EQ(shown.back().find("reward") != std::string::npos, width >= 60) << shown.back();
    EXPECT_TRUE(width < 200 || shown.back().find("/150 [########################] ") == 8)
        << shown.back();
    std::filesystem::remove_all(run_);
  }
}

TEST_F(Progress, FollowsTheTerminalsSize) {
  Terminal terminal(train(1'000'000), 200);  // more steps than the test waits for
  terminal.read_to("\r\033[Kgrpo ");
  terminal.resize(40);
  const size_t before = bars(terminal.read_available()).size();
  const std::vector<std::string> shown = terminal.read_bars(before + 4);
  ASSERT_GE(shown.size(), before + 4);
  EXPECT_GT(shown[0].size(), 80u);
  // One line may have been buffered, and the last may be incomplete.
  for (size_t i = before + 1; i + 1 < shown.size(); ++i)
    EXPECT_LT(shown[i].size(), 40u) << shown[i];
}

TEST_F(Progress, ShowsTheTimeLeftAfterAFewSteps) {
  Terminal terminal(train(300), 200);
  const std::vector<std::string> shown = bars(terminal.read_all());
  EXPECT_EQ(terminal.wait(), 0);
  ASSERT_GE(shown.size(), 2u);
  EXPECT_LT(step_of(shown[0]), 3);
  for (const std::string& bar : shown)
    EXPECT_EQ(bar.find(" left") != std::string::npos, step_of(bar) >= 3) << bar;
}

TEST_F(Progress, TheLogFileHasTheMessagesOfTheRun) {
  Terminal terminal(train(150), 80);
  const std::string output = terminal.read_all();
  EXPECT_EQ(terminal.wait(), 0);
  const std::string log = read_file(run_ + "/log.txt");
  for (const std::string& text :
       {"run directory: " + run_, std::string("step 0: pass@1 (task) 0."),
        std::string("step 100: pass@1"), std::string("step 150: pass@1"),
        std::string("mean reward over 150 steps"), std::string("before GRPO (held-out"),
        std::string("run: pass@1 (task) 0.")}) {
    EXPECT_NE(log.find(text), std::string::npos) << text << "\n" << log;
    EXPECT_NE(output.find(text), std::string::npos) << text << "\n" << output;
  }
  const size_t once = output.find("step 100: pass@1");
  EXPECT_EQ(output.find("step 100: pass@1", once + 1), std::string::npos);
}

TEST_F(Progress, TheLogFileHasTheErrorThatEndedARun) {
  ASSERT_EQ(run_cohort(train(2)).code, 0);
  const std::string log = read_file(run_ + "/log.txt");
  const Output output = run_cohort({"train", "--resume", run_, "steps=4", "data.task=sort"});
  EXPECT_EQ(output.code, 2);
  const std::string added = read_file(run_ + "/log.txt").substr(log.size());
  const std::string message = output.err.substr(output.err.find("cohort: ") + 8);
  EXPECT_NE(added.find("failed: " + message), std::string::npos) << added << "\n" << output.err;
}

}  // namespace
}  // namespace cohort::test
