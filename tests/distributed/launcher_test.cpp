// The launcher, with shell commands as ranks.
#include "distributed/launcher.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <set>
#include <thread>

#include "tests/support/test_util.h"

namespace cohort {
namespace {

using std::chrono::milliseconds;

struct Launched {
  LaunchResult result;
  std::vector<std::string> lines;  // "1: text", sorted
};

LaunchOptions shell(int count, const std::string& script) {
  return {.command = {"/bin/sh", "-c", script}, .count = count, .exit_code_of_peer = 3};
}

Launched launch(LaunchOptions options, const std::atomic<bool>& stop = false) {
  Launched out;
  options.on_line = [&](int rank, const std::string& line) {
    out.lines.push_back(str(rank, ": ", line));
  };
  out.result = launch_ranks(options, stop);
  std::sort(out.lines.begin(), out.lines.end());
  return out;
}

TEST(Launcher, SetsTheRankVariablesAndForwardsOutputLines) {
  const Launched out = launch(shell(3,
                                    "test $RANK = 0 && exit 0; echo "
                                    "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE "
                                    "$MASTER_ADDR; echo problem >&2; printf 'no end'"));
  EXPECT_EQ(out.result.code, 0);
  EXPECT_EQ(out.result.message, "");
  EXPECT_EQ(out.lines,
            (std::vector<std::string>{"1: 1/3 1/3 127.0.0.1", "1: no end", "1: problem",
                                      "2: 2/3 2/3 127.0.0.1", "2: no end", "2: problem"}));
}

TEST(Launcher, ReplacesWhatAnotherLauncherSet) {
  setenv("WORLD_SIZE", "64", 1);
  setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
  const Launched out =
      launch(shell(2, "test $RANK = 0 || echo $WORLD_SIZE $TORCHELASTIC_USE_AGENT_STORE."));
  unsetenv("WORLD_SIZE");
  unsetenv("TORCHELASTIC_USE_AGENT_STORE");
  EXPECT_EQ(out.lines, std::vector<std::string>{"1: 2 ."});
}

// Two launchers may find the same port free.
TEST(Launcher, EveryStartHasANameOfItsOwn) {
  setenv("TORCHELASTIC_RUN_ID", "of another launcher", 1);
  std::set<std::string> names;
  for (int i = 0; i < 2; ++i)
    for (const std::string& line : launch(shell(3, "echo $TORCHELASTIC_RUN_ID")).lines)
      names.insert(line.substr(3));
  unsetenv("TORCHELASTIC_RUN_ID");
  EXPECT_EQ(names.size(), 2u);
  for (const std::string& name : names) EXPECT_TRUE(name.starts_with("cohort-")) << name;
}

TEST(Launcher, TheFirstFailureGivesTheExitCode) {
  EXPECT_EQ(launch(shell(3, "test $RANK = 1 && exit 7; sleep 0.3; exit 9")).result.code, 7);
  EXPECT_EQ(launch(shell(2, "test $RANK = 1 && exit 2; exit 0")).result.code, 2);
}

TEST(Launcher, APeerFailureCodeIsNotTheFirstFailure) {
  EXPECT_EQ(launch(shell(2, "test $RANK = 1 && exit 3; sleep 0.3; exit 1")).result.code, 1);
  EXPECT_EQ(launch(shell(2, "exit 3")).result.code, 3);
}

TEST(Launcher, ASignalIsReported) {
  const Launched out = launch(shell(2, "test $RANK = 1 && kill -KILL $$; sleep 0.2; exit 3"));
  EXPECT_EQ(out.result.code, 128 + SIGKILL);
  EXPECT_EQ(out.result.message, "rank 1 was terminated by signal 9 (Killed)");
}

TEST(Launcher, RanksThatOutliveAFailureAreKilled) {
  LaunchOptions options = shell(2, "test $RANK = 1 && exit 5; exec sleep 60");
  options.grace = milliseconds(200);
  const auto start = std::chrono::steady_clock::now();
  const Launched out = launch(options);
  EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(5000));
  EXPECT_EQ(out.result.code, 5);
  EXPECT_EQ(out.result.message, "rank 0 was killed: it did not end after another rank had failed");
}

// Ranks that note their start and run `script`; returns the exit code and the starts of rank 0.
std::pair<int, int> launch_again(int restarts, const std::string& script,
                                 const std::atomic<bool>& stop = false) {
  const test::TempDir dir;
  LaunchOptions options =
      shell(2, "cd " + dir.path() + "; test $RANK = 0 && echo >> starts; sleep 0.1; " + script);
  options.restarts = restarts;
  options.final_codes = {2, 130};
  int announced = 0;
  options.on_restart = [&](const LaunchResult& failed) {
    EXPECT_NE(failed.code, 0);
    ++announced;
  };
  const int code = launch(options, stop).result.code;
  const int starts = static_cast<int>(test::read_file(dir.path("starts")).size());
  EXPECT_EQ(starts, announced + 1);
  return {code, starts};
}

TEST(Launcher, StartsAllAgainAfterAFailure) {
  const std::string fails_twice = "test $(wc -l < starts) -gt 2 && exit 0; test $RANK = 1 && ";
  for (const char* failure : {"kill -KILL $$", "exit 1", "exit 4"})
    EXPECT_EQ(launch_again(5, fails_twice + failure + "; exit 3"), std::pair(0, 3)) << failure;
  EXPECT_EQ(launch_again(2, "exit 1"), std::pair(1, 3));
  EXPECT_EQ(launch_again(1, fails_twice + "kill -KILL $$; exit 3"), std::pair(128 + SIGKILL, 2));
  EXPECT_EQ(launch_again(0, "exit 1"), std::pair(1, 1));
}

TEST(Launcher, DoesNotStartAgainAfterBadInputAnInterruptOrAStop) {
  EXPECT_EQ(launch_again(5, "test $RANK = 1 && exit 2; exit 3"), std::pair(2, 1));
  EXPECT_EQ(launch_again(5, "exit 130"), std::pair(130, 1));
  std::atomic<bool> stop{false};
  std::jthread later([&] {
    std::this_thread::sleep_for(milliseconds(300));
    stop = true;
  });
  EXPECT_EQ(launch_again(5, "exec sleep 60", stop), std::pair(128 + SIGTERM, 1));
}

TEST(Launcher, AStopReachesAllRanks) {
  std::atomic<bool> stop{false};
  std::jthread later([&] {
    std::this_thread::sleep_for(milliseconds(300));
    stop = true;
  });
  const Launched out =
      launch(shell(3, "trap 'exit 130' TERM; while true; do sleep 0.05; done"), stop);
  EXPECT_EQ(out.result.code, 130);
}

TEST(Launcher, RanksThatEndByTheForwardedStopAreNoFailure) {
  std::atomic<bool> stop{false};
  std::jthread later([&] {
    std::this_thread::sleep_for(milliseconds(300));
    stop = true;
  });
  const Launched out = launch(shell(2, "exec sleep 60"), stop);
  EXPECT_EQ(out.result.code, 128 + SIGTERM);
  EXPECT_EQ(out.result.message, "");
}

TEST(Launcher, NoRankOutlivesTheLauncher) {
  const test::TempDir dir;
  const pid_t launcher = fork();
  ASSERT_GE(launcher, 0);
  if (launcher == 0) {
    const std::atomic<bool> stop{false};
    launch_ranks(shell(2, "echo $$ > " + dir.path() + "/$RANK.tmp; mv " + dir.path() +
                              "/$RANK.tmp " + dir.path() + "/$RANK; exec sleep 60"),
                 stop);
    _exit(0);
  }
  for (const char* rank : {"0", "1"})
    for (int i = 0; i < 500 && !std::filesystem::exists(dir.path(rank)); ++i)
      std::this_thread::sleep_for(milliseconds(10));
  kill(launcher, SIGKILL);
  waitpid(launcher, nullptr, 0);
  for (const char* rank : {"0", "1"}) {
    const pid_t pid = std::stoi(test::read_file(dir.path(rank)));
    bool gone = false;
    for (int i = 0; i < 500 && !gone; ++i) {
      // An orphan that its new parent does not reap stays a zombie.
      const std::string stat = str("/proc/", pid, "/stat");
      const std::string text = std::filesystem::exists(stat) ? test::read_file(stat) : "";
      gone = text.empty() || text.find(") Z ") != std::string::npos;
      if (!gone) std::this_thread::sleep_for(milliseconds(10));
    }
    EXPECT_TRUE(gone) << "rank " << rank << " is still running as " << pid;
  }
}

TEST(Launcher, AProgramThatDoesNotExistIsAFailure) {
  EXPECT_EQ(launch({.command = {"/no/such/program"}, .count = 2}).result.code, 127);
  EXPECT_THROW_WITH(launch({.command = {}, .count = 2}), Error, "expected a command");
}

}  // namespace
}  // namespace cohort
