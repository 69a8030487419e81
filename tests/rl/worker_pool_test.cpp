// Worker programs that answer, fail, hang, flood or fork.
#include "rl/worker_pool.h"

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>

#include "rl/caller.h"
#include "sys/input_file.h"
#include "tests/support/test_util.h"

namespace cohort::test {
namespace {

namespace fs = std::filesystem;

// A worker program that executes the command in each line.
constexpr const char* kProgram = R"(
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
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
    elif what[0] == "long": say("y" * int(what[1]))
    elif what[0] == "slow":
        for letter in "slowly\n":
            sys.stdout.write(letter), sys.stdout.flush()
            time.sleep(0.01)
    elif what[0] == "deaf": say("deaf"), os.close(0), time.sleep(1000)
    elif what[0] == "linger": os.close(1), time.sleep(0.3), os._exit(9)
    elif what[0] == "parent": say(str(os.getppid()))
    elif what[0] == "mute": os.close(1), time.sleep(1000)
    elif what[0] == "leave": os.setpgid(0, os.getpgid(os.getppid())), time.sleep(1000)
    elif what[0] == "stop": os.kill(os.getpid(), signal.SIGSTOP)
    elif what[0] == "unasked": say("1"), time.sleep(0.1), say("2"), time.sleep(1000)
    elif what[0] == "spawner": os.kill(os.getppid(), signal.SIGKILL), time.sleep(1000)
    elif what[0] == "fill": os.ftruncate(2, 300 << 20), say("full")
    elif what[0] == "crowd":
        for _ in range(50):
            if os.fork() == 0:
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                if os.fork(): time.sleep(1000)
                os.setsid()
                time.sleep(1000)
        say(str(os.getpid()))
    elif what[0] == "take": sys.stderr.write("taking\n"), say(str(len(bytearray(1 << 30))))
if len(sys.argv) > 1: open(sys.argv[1], "w").close()
)";

class Workers : public testing::Test {
 protected:
  Workers() { write_file(dir_.path("program.py"), kProgram); }
  WorkerPoolOptions options(int workers = 3) const {
    return {.program = {.command = {"python3", dir_.path("program.py")}},
            .workers = workers,
            .timeout = 2,
            .start_timeout = 3,
            .validate = [](const std::string&, const std::string& answer) {
              return std::string(answer.find("lie") == answer.npos ? "" : "the answer is a lie");
            }};
  }
  static std::string ask(RequestPool& pool, const std::string& request) {
    pool.submit(request);
    const RequestPool::Answer answer = pool.take(RequestPool::Wait::kAll).at(0);
    return answer.error.empty() ? answer.line : "! " + answer.error;
  }
  static size_t open_descriptors() {
    return static_cast<size_t>(
        std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator()));
  }
  TempDir dir_;
};

using WorkersSlow = Workers;

// True if the process has ended, also if it is still a zombie.
bool is_gone(pid_t id) {
  std::ifstream file(str("/proc/", id, "/stat"));
  std::string text;
  return !std::getline(file, text) || text.find(") Z ") != text.npos;
}

TEST_F(Workers, AnswersComeInTheOrderOfTheRequests) {
  ProcessSpawner spawner;
  const auto owner = make_worker_pool(spawner, options());
  RequestPool& pool = *owner;
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 100; ++i) pool.submit(str("say ", i));
    const auto answers = pool.take(RequestPool::Wait::kAll);
    ASSERT_EQ(answers.size(), 100u);
    for (int i = 0; i < 100; ++i)
      EXPECT_EQ(answers[static_cast<size_t>(i)].line, std::to_string(i));
  }
  EXPECT_TRUE(pool.take(RequestPool::Wait::kAll).empty());
  EXPECT_EQ(ask(pool, "say " + std::string(900'000, 'x')).size(), 900'000u);
  EXPECT_EQ(ask(pool, "slow"), "slowly");
}

// A list of many completions has an answer of similar length.
TEST_F(Workers, AnswersMayBeAsLongAsTheirRequests) {
  ProcessSpawner spawner;
  const auto owner = make_worker_pool(spawner, options(1));
  RequestPool& pool = *owner;
  EXPECT_EQ(ask(pool, "long 2000000 " + std::string(2'000'000, ' ')).size(), 2'000'000u);
  EXPECT_NE(ask(pool, "long 2000000").find("its answer is over 1 MB"), std::string::npos);
}

// Without waiting for its timeout.
TEST_F(Workers, AProgramThatClosesItsInputIsReplacedAtOnce) {
  ProcessSpawner spawner;
  WorkerPoolOptions patient = options(1);
  patient.timeout = 60;
  const auto owner = make_worker_pool(spawner, patient);
  RequestPool& pool = *owner;
  EXPECT_EQ(ask(pool, "deaf"), "deaf");
  usleep(300'000);  // it closes its input after it has answered
  EXPECT_NE(ask(pool, "say 1").find("closed its input (ended by cohort)"), std::string::npos);
  EXPECT_EQ(ask(pool, "say 2"), "2");
}

TEST_F(Workers, UnsolicitedOutputFailsNoRequest) {
  ProcessSpawner spawner;
  const auto owner = make_worker_pool(spawner, options(1));
  RequestPool& pool = *owner;
  EXPECT_EQ(ask(pool, "unasked"), "1");
  usleep(500'000);
  EXPECT_EQ(ask(pool, "say 3"), "3");
}

// A program that does not flush its output, with a long timeout for loading a model.
TEST_F(WorkersSlow, ProgramsThatNeverAnswerAreGivenUp) {
  ProcessSpawner spawner;
  WorkerPoolOptions short_timeout = options(2);
  short_timeout.start_timeout = 1;
  const auto owner = make_worker_pool(spawner, short_timeout);
  RequestPool& pool = *owner;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 100; ++i) pool.submit("hang");
  const auto answers = pool.take(RequestPool::Wait::kAll);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  for (const size_t i : {0, 99})
    EXPECT_NE(answers[i].error.find("does it flush its output"), std::string::npos);
}

TEST_F(Workers, AProgramThatCannotBeRestartedFailsItsRequest) {
  ProcessSpawner spawner;
  WorkerPoolOptions moving = options(1);
  moving.program.directory = dir_.path("place");
  fs::create_directory(dir_.path("place"));
  const auto owner = make_worker_pool(spawner, moving);
  RequestPool& pool = *owner;
  EXPECT_EQ(ask(pool, "say 1"), "1");
  fs::remove(dir_.path("place"));
  EXPECT_NE(ask(pool, "die").find("(exit code 3)"), std::string::npos);
  for (int i = 0; i < 2; ++i)
    EXPECT_EQ(ask(pool, "say 2"), "! cannot run 'python3': No such file or directory");
  fs::create_directory(dir_.path("place"));
  EXPECT_EQ(ask(pool, "say 3"), "3");
}

TEST_F(Workers, ADeadHostIsAnError) {
  ProcessSpawner spawner;
  const auto owner = make_worker_pool(spawner, options(3));
  RequestPool& pool = *owner;
  EXPECT_EQ(ask(pool, "say 1"), "1");
  EXPECT_THROW_WITH(ask(pool, "spawner"), Error, "the process that starts programs has ended");
  EXPECT_THROW_WITH(ask(pool, "say 2"), Error, "the process that starts programs has ended");
}

TEST_F(Workers, AStoppedHostIsContinued) {
  auto spawner = std::make_unique<ProcessSpawner>();
  auto pool = make_worker_pool(*spawner, options(1));
  const pid_t id = std::stoi(ask(*pool, "parent"));
  ::kill(id, SIGSTOP);
  {
    const ExpectLog expected("was stopped, and is continued");
    EXPECT_NE(ask(*pool, "die").find("(exit code 3)"), std::string::npos);
  }
  EXPECT_EQ(ask(*pool, "say 1"), "1");
  pool.reset();
  ::kill(id, SIGSTOP);
  const auto start = std::chrono::steady_clock::now();
  spawner.reset();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
}

TEST_F(Workers, TooFewDescriptorsAreAnInputError) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "checks of the sanitizers need descriptors of their own";
#endif
  ProcessSpawner spawner;
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit few{open_descriptors() + 20, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  EXPECT_THROW_WITH(make_worker_pool(spawner, options(64)), InputError, "hint: fewer workers");
  {
    const auto owner = make_worker_pool(spawner, options(4));
    RequestPool& pool = *owner;
    EXPECT_EQ(ask(pool, "die").substr(0, 1), "!");
    EXPECT_EQ(ask(pool, "say 1"), "1");
  }
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
}

// The setting that `trap '' CHLD` leaves behind.
TEST_F(Workers, HaveAnExitCodeIfTheRunIgnoresSigchld) {
  ::signal(SIGCHLD, SIG_IGN);
  {
    ProcessSpawner spawner;
    const auto owner = make_worker_pool(spawner, options(1));
    RequestPool& pool = *owner;
    EXPECT_NE(ask(pool, "die").find("(exit code 3)"), std::string::npos);
  }
  ::signal(SIGCHLD, SIG_DFL);
}

TEST_F(Workers, CannotFillTheDiskThroughTheirLog) {
  ProcessSpawner spawner;
  spawner.set_log(dir_.path("log"));
  const auto owner = make_worker_pool(spawner, options(1));
  RequestPool& pool = *owner;
  EXPECT_EQ(ask(pool, "fill"), "full");
  for (int i = 0; i < 3000 && fs::file_size(dir_.path("log")) > 1000; ++i) usleep(1000);
  EXPECT_NE(read_file(dir_.path("log")).find("this log was longer than 256 MB"), std::string::npos);
}

TEST_F(WorkersSlow, AFailureFailsOneRequest) {
  const size_t before = open_descriptors();
  {
    ProcessSpawner spawner;
    const auto owner = make_worker_pool(spawner, options());
    RequestPool& pool = *owner;
    const std::map<std::string, std::string> errors = {
        {"hang", "no answer in "},
        {"die", "it has ended, or closed its output (exit code 3)"},
        {"flood", "its answer is over 1 MB"},
        {"two", "it wrote more than one line"},
        {"lie", "the answer is a lie"},
        {"hide", "(exit code 4)"},
        {"linger", "it has ended, or closed its output (exit code 9)"},
        {"mute", "it has ended, or closed its output (ended by cohort)"},
        {"leave", "no answer in "},
        {"stop", "no answer in "},
    };
    std::vector<std::string> sent;
    for (int round = 0; round < 2; ++round)
      for (const auto& [request, error] : errors)
        for (const std::string& each : {request, str("say ", sent.size())}) {
          sent.push_back(each);
          pool.submit(each);
        }
    const auto answers = pool.take(RequestPool::Wait::kAll);
    for (size_t i = 0; i < sent.size(); ++i) {
      const auto error = errors.find(sent[i]);
      if (error == errors.end())
        EXPECT_EQ("say " + answers[i].line, sent[i]) << answers[i].error;
      else
        EXPECT_NE(answers[i].error.find(error->second), std::string::npos)
            << sent[i] << ": " << answers[i].error;
    }
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST_F(WorkersSlow, KilledProgramsAreRestarted) {
  ProcessSpawner spawner;
  const auto owner = make_worker_pool(spawner, options(2));
  RequestPool& pool = *owner;
  const size_t before = open_descriptors();
  int killed = 0;
  for (int i = 0; i < 30; ++i) {
    const std::string answer = ask(pool, "pid");
    // The program may have been killed before it received the request.
    if (answer.starts_with("!")) {
      EXPECT_NE(answer.find("it has ended, or closed its"), std::string::npos) << answer;
      EXPECT_NE(answer.find("(signal 9)"), std::string::npos) << answer;
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

TEST_F(Workers, HaveAMomentAtTheEndOfTheirInput) {
  ProcessSpawner spawner;
  WorkerPoolOptions one = options(1);
  one.program.command.push_back(dir_.path("ended"));
  {
    const auto owner = make_worker_pool(spawner, one);
    EXPECT_EQ(ask(*owner, "say 1"), "1");
    EXPECT_FALSE(fs::exists(dir_.path("ended")));
  }
  EXPECT_TRUE(fs::exists(dir_.path("ended")));
}

TEST_F(Workers, EndWithTheHostAndAllThatTheyHaveStarted) {
  std::vector<pid_t> all;
  const auto start = [&] {
    ProcessSpawner spawner;
    const auto owner = make_worker_pool(spawner, options(1));
    RequestPool& pool = *owner;
    for (const char* request : {"pid", "fork", "detach"})
      all.push_back(std::stoi(ask(pool, request)));
    for (const pid_t id : all) EXPECT_FALSE(is_gone(id));
    return std::chrono::steady_clock::now();
  }();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
  for (const pid_t id : all) EXPECT_TRUE(is_gone(id)) << id;
}

TEST_F(WorkersSlow, EndWithHundredsOfDescendants) {
  const auto crowd = [&] {
    int count = 0;
    for (const auto& entry : fs::directory_iterator("/proc")) {
      std::ifstream file(entry.path() / "cmdline");
      std::string text((std::istreambuf_iterator<char>(file)), {});
      count += text.find(dir_.path("program.py")) != std::string::npos;
    }
    return count;
  };
  const auto start = [&] {
    ProcessSpawner spawner;
    const auto owner = make_worker_pool(spawner, options(4));
    RequestPool& pool = *owner;
    for (int i = 0; i < 8; ++i) EXPECT_GT(std::stoi(ask(pool, "crowd")), 0);
    EXPECT_GE(crowd(), 700);
    return std::chrono::steady_clock::now();
  }();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  EXPECT_EQ(crowd(), 0);
}

TEST_F(Workers, HaveTheirDirectoryAndMemoryLimit) {
  ProcessSpawner spawner;
  spawner.set_log(dir_.path("log"));
  WorkerPoolOptions limited = options(1);
  limited.timeout = 20;
  limited.program.directory = dir_.path("");
  limited.program.memory = 512 << 20;
  const auto owner = make_worker_pool(spawner, limited);
  RequestPool& pool = *owner;
  EXPECT_EQ(fs::canonical(ask(pool, "where")), fs::canonical(dir_.path("")));
  EXPECT_NE(ask(pool, "take").find("(exit code 1)"), std::string::npos);
  const std::string log = read_file(dir_.path("log"));
  EXPECT_NE(log.find("taking\n"), std::string::npos);
  EXPECT_NE(log.find("MemoryError"), std::string::npos);
}

TEST_F(Workers, ProgramsThatCannotBeStartedAreInputErrors) {
  ProcessSpawner spawner;
  WorkerPoolOptions missing = options();
  missing.program.command = {"no-such-program", "x"};
  EXPECT_THROW_WITH(make_worker_pool(spawner, missing), InputError,
                    "cannot run 'no-such-program': No such file or directory");
  missing = options();
  missing.program.directory = dir_.path("nowhere");
  EXPECT_THROW_WITH(make_worker_pool(spawner, missing), InputError, "cannot run 'python3'");
}

TEST(CommandLine, IsSplitAtBlanksOutsideOfQuotes) {
  using Words = std::vector<std::string>;
  EXPECT_EQ(split_command("python3  a.py --x=1"), (Words{"python3", "a.py", "--x=1"}));
  EXPECT_EQ(split_command(R"(sh -c "echo '1' $HOME" '' 'a "b"'c)"),
            (Words{"sh", "-c", "echo '1' $HOME", "", "a \"b\"c"}));
  EXPECT_THROW_WITH(split_command("a 'b"), InputError, "a quote ' is not closed");
  EXPECT_THROW_WITH(split_command(" "), InputError, "needs a program to run");
}

}  // namespace
}  // namespace cohort::test
