// Programs that behave, and programs that do not.
#include "rl/worker_pool.h"

#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>

#include "data/file.h"
#include "rl/rewards/command.h"
#include "tests/support/test_util.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

// Does what each line says.
constexpr const char* kProgram = R"(
import os, sys, time
def say(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
def child(detached):
    pid = os.fork()
    if pid: return pid
    if detached: os.setsid()
    time.sleep(1000)
for line in sys.stdin:
    what = line.split()
    if what[0] == "say": say(what[1])
    elif what[0] == "pid": say(str(os.getpid()))
    elif what[0] == "hang": time.sleep(1000)
    elif what[0] == "die": os._exit(3)
    elif what[0] == "flood": say("x" * 2000000)
    elif what[0] == "two": say("1\n2")
    elif what[0] == "lie": say("a lie")
    elif what[0] == "fork": say(str(child(False)))
    elif what[0] == "detach": say(str(child(True)))
    elif what[0] == "hide": child(False), os._exit(4)
    elif what[0] == "where": say(os.getcwd())
    elif what[0] == "take": sys.stderr.write("taking\n"), say(str(len(bytearray(1 << 30))))
)";

class Workers : public testing::Test {
 protected:
  Workers() { write_file(dir_.path("program.py"), kProgram); }
  WorkerPoolOptions options(int workers = 3) const {
    return {.program = {.command = {"python3", dir_.path("program.py")}},
            .workers = workers,
            .timeout = 3,
            .start_timeout = 3,
            .fault_of = [](const std::string&, const std::string& answer) {
              return std::string(answer.find("lie") == answer.npos ? "" : "it lies");
            }};
  }
  static std::string ask(WorkerPool& pool, const std::string& request) {
    pool.submit(request);
    const WorkerPool::Answer answer = pool.collect().at(0);
    return answer.fault.empty() ? answer.line : "! " + answer.fault;
  }
  static size_t open_descriptors() {
    return static_cast<size_t>(
        std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator()));
  }
  TempDir dir_;
};

// Also where only the zombie is left.
bool is_gone(pid_t id) {
  std::ifstream file(str("/proc/", id, "/stat"));
  std::string text;
  return !std::getline(file, text) || text.find(") Z ") != text.npos;
}

TEST_F(Workers, AnswersComeInTheOrderOfTheRequests) {
  WorkerHost host;
  WorkerPool pool(host, options());
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 100; ++i) pool.submit(str("say ", i));
    const auto answers = pool.collect();
    ASSERT_EQ(answers.size(), 100u);
    for (int i = 0; i < 100; ++i)
      EXPECT_EQ(answers[static_cast<size_t>(i)].line, std::to_string(i));
  }
  EXPECT_TRUE(pool.collect().empty());
  EXPECT_EQ(ask(pool, "say " + std::string(900'000, 'x')).size(), 900'000u);
}

TEST_F(Workers, WhatGoesWrongCostsOneRequest) {
  const size_t before = open_descriptors();
  {
    WorkerHost host;
    WorkerPool pool(host, options());
    const std::map<std::string, std::string> faults = {
        {"hang", "no answer in 3 s (signal 9)"},
        {"die", "it has ended (exit code 3)"},
        {"flood", "its answer is over 1 MB"},
        {"two", "it wrote more than one line"},
        {"lie", "it lies"},
        {"hide", "(exit code 4)"},
    };
    std::vector<std::string> sent;
    for (int round = 0; round < 2; ++round)
      for (const auto& [request, fault] : faults)
        for (const std::string& each : {request, str("say ", sent.size())}) {
          sent.push_back(each);
          pool.submit(each);
        }
    const auto answers = pool.collect();
    for (size_t i = 0; i < sent.size(); ++i) {
      const auto fault = faults.find(sent[i]);
      if (fault == faults.end())
        EXPECT_EQ("say " + answers[i].line, sent[i]) << answers[i].fault;
      else
        EXPECT_NE(answers[i].fault.find(fault->second), std::string::npos)
            << sent[i] << ": " << answers[i].fault;
    }
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST_F(Workers, ThoseThatAreKilledAreStartedAgain) {
  WorkerHost host;
  WorkerPool pool(host, options(2));
  const size_t before = open_descriptors();
  int killed = 0;
  for (int i = 0; i < 30; ++i) {
    const std::string answer = ask(pool, "pid");
    // It may have been killed before the request came to it.
    if (answer.starts_with("!")) {
      EXPECT_NE(answer.find("it has ended (signal 9)"), std::string::npos) << answer;
      continue;
    }
    ++killed;
    ASSERT_EQ(::kill(std::stoi(answer), SIGKILL), 0) << answer;
  }
  EXPECT_GE(killed, 15);
  while (ask(pool, "say hello") != "hello") {
  }
  EXPECT_LE(open_descriptors(), before);
}

TEST_F(Workers, EndWithTheHostWhateverTheyHaveStarted) {
  std::vector<pid_t> all;
  const auto start = [&] {
    WorkerHost host;
    WorkerPool pool(host, options(1));
    for (const char* request : {"pid", "fork", "detach"})
      all.push_back(std::stoi(ask(pool, request)));
    for (const pid_t id : all) EXPECT_FALSE(is_gone(id));
    return std::chrono::steady_clock::now();
  }();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
  for (const pid_t id : all) EXPECT_TRUE(is_gone(id)) << id;
}

TEST_F(Workers, RunWhereTheyShouldAndTakeWhatTheyMay) {
  WorkerHost host;
  host.set_log(dir_.path("log"));
  WorkerPoolOptions small = options(1);
  small.timeout = 20;
  small.program.directory = dir_.path("");
  small.program.memory = 512 << 20;
  WorkerPool pool(host, small);
  EXPECT_EQ(fs::canonical(ask(pool, "where")), fs::canonical(dir_.path("")));
  EXPECT_NE(ask(pool, "take").find("it has ended (exit code 1)"), std::string::npos);
  const std::string log = read_file(dir_.path("log"));
  EXPECT_NE(log.find("taking\n"), std::string::npos);
  EXPECT_NE(log.find("MemoryError"), std::string::npos);
}

TEST_F(Workers, ProgramsThatCannotBeStartedAreInputErrors) {
  WorkerHost host;
  WorkerPoolOptions missing = options();
  missing.program.command = {"no-such-program", "x"};
  EXPECT_THROW_WITH(WorkerPool(host, missing), InputError,
                    "cannot run 'no-such-program': No such file or directory");
  missing = options();
  missing.program.directory = dir_.path("nowhere");
  EXPECT_THROW_WITH(WorkerPool(host, missing), InputError, "cannot run 'python3'");
}

TEST(CommandLine, IsSplitAsAShellWouldWithoutTheShell) {
  using Words = std::vector<std::string>;
  EXPECT_EQ(split_command("python3  a.py --x=1"), (Words{"python3", "a.py", "--x=1"}));
  EXPECT_EQ(split_command(R"(sh -c "echo '1' $HOME" '' 'a "b"'c)"),
            (Words{"sh", "-c", "echo '1' $HOME", "", "a \"b\"c"}));
  EXPECT_THROW_WITH(split_command("a 'b"), InputError, "a quote ' is not closed");
  EXPECT_THROW_WITH(split_command(" "), InputError, "needs a program to run");
}

}  // namespace
}  // namespace cohort::test
