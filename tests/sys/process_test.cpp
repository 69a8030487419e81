// Programs as child processes, polling of their output, and sockets.
#include "sys/process.h"

#include <signal.h>
#include <sys/wait.h>

#include <filesystem>
#include <thread>

#include "sys/polling.h"
#include "sys/sockets.h"
#include "tests/support/test_util.h"

namespace cohort {
namespace {

using std::chrono::milliseconds;

constexpr int kExit0 = 0, kExit3 = 3 << 8;  // as waitpid() reports them

// Everything that a program writes to its standard output, and its status.
std::pair<std::string, int> output_of(SpawnOptions program) {
  Pipe pipe = make_pipe();
  set_non_blocking(pipe.reading);
  program.streams[1] = pipe.writing.get();
  const Spawned spawned = spawn(program);
  EXPECT_EQ(spawned.error, 0);
  pipe.writing.close();
  std::string out;
  while (poll_until(Clock::now() + milliseconds(20000), {{pipe.reading.get(), POLLIN, 0}}) &&
         read_available(pipe.reading.get(), out) >= 0) {
  }
  return {out, wait_for_exit(spawned.id).value()};
}

TEST(Spawn, PassesArgumentsEnvironmentDirectoryAndStreams) {
  const test::TempDir dir;
  SpawnOptions program{.command = {"sh", "-c", "echo \"$1 $NAME\"; pwd; exit 3", "sh", "a b"},
                       .environment = {"NAME=value", "PATH=/usr/bin:/bin"},
                       .directory = dir.path()};
  EXPECT_EQ(
      output_of(program),
      std::pair("a b value\n" + std::filesystem::canonical(dir.path()).string() + "\n", kExit3));
  ::setenv("COHORT_TEST_NAME", "inherited", 1);
  EXPECT_EQ(output_of({.command = {"sh", "-c", "echo $COHORT_TEST_NAME"}}),
            std::pair(std::string("inherited\n"), kExit0));
  ::unsetenv("COHORT_TEST_NAME");
}

TEST(Spawn, LimitsMemoryAndHasAProcessGroupOfItsOwn) {
  EXPECT_EQ(output_of({.command = {"sh", "-c", "ulimit -v"}, .memory = 1 << 30}).first,
            "1048576\n");
  const Spawned sleeper = spawn({.command = {"sleep", "60"}});
  ASSERT_GT(sleeper.id, 0);
  EXPECT_EQ(::getpgid(sleeper.id), sleeper.id);
  EXPECT_EQ(wait_for_exit(sleeper.id, milliseconds(20)), std::nullopt);
  ::kill(-sleeper.id, SIGKILL);
  const std::optional<int> status = wait_for_exit(sleeper.id, milliseconds(10000));
  ASSERT_TRUE(status.has_value());
  EXPECT_TRUE(WIFSIGNALED(*status));
  EXPECT_EQ(WTERMSIG(*status), SIGKILL);
}

TEST(Spawn, ReportsWhyAProgramCannotBeExecuted) {
  const Spawned missing = spawn({.command = {"/no/such/program"}});
  EXPECT_EQ(missing.error, ENOENT);
  ASSERT_GT(missing.id, 0);
  EXPECT_EQ(wait_for_exit(missing.id), 127 << 8);
  EXPECT_EQ(wait_for_exit(missing.id), 127 << 8);  // no longer a child
  const Spawned lost = spawn({.command = {"true"}, .directory = "/no/such/folder"});
  EXPECT_EQ(lost.error, ENOENT);
  wait_for_exit(lost.id);
}

TEST(Polling, EndsAtTheDeadline) {
  const Pipe pipe = make_pipe();
  const Clock::time_point start = Clock::now();
  EXPECT_FALSE(poll_until(start + milliseconds(30), {{pipe.reading.get(), POLLIN, 0}}));
  EXPECT_GE(Clock::now(), start + milliseconds(30));
  EXPECT_FALSE(poll_until(start, {{-1, POLLIN, 0}}));
  EXPECT_TRUE(poll_until(start, {{-1, POLLIN, 0}, {pipe.writing.get(), POLLOUT, 0}}));
}

TEST(Polling, ReadsWhatIsAvailable) {
  Pipe pipe = make_pipe();
  set_non_blocking(pipe.reading);
  std::string out = "1";
  EXPECT_EQ(read_available(pipe.reading.get(), out), 0);
  ASSERT_EQ(::write(pipe.writing.get(), "23", 2), 2);
  EXPECT_EQ(read_available(pipe.reading.get(), out), 2);
  EXPECT_EQ(out, "123");
  pipe.writing.close();
  EXPECT_EQ(read_available(pipe.reading.get(), out), -1);
  EXPECT_EQ(read_available(-1, out), -1);
  EXPECT_EQ(out, "123");
}

TEST(Polling, AnEventWakesAnotherThread) {
  const WakeEvent event;
  const auto is_set = [&](milliseconds limit) {
    return poll_until(Clock::now() + limit, {{event.fd(), POLLIN, 0}});
  };
  EXPECT_FALSE(is_set(milliseconds(0)));
  {
    std::jthread other([&] { event.signal(); });
    EXPECT_TRUE(is_set(milliseconds(20000)));
  }
  event.signal();  // counts once
  event.clear();
  EXPECT_FALSE(is_set(milliseconds(0)));
}

TEST(Sockets, ConnectAndExchangeBytes) {
  const int port = free_port();
  std::string why;
  EXPECT_FALSE(connect_to("127.0.0.1", port, milliseconds(1000), why).is_open());
  EXPECT_EQ(why, "Connection refused");
  const Descriptor listener = listen_on("127.0.0.1", port, why);
  ASSERT_TRUE(listener.is_open()) << why;
  EXPECT_FALSE(accept_from(listener).has_value());
  Descriptor client = connect_to("127.0.0.1", port, milliseconds(1000), why);
  ASSERT_TRUE(client.is_open()) << why;
  ASSERT_TRUE(poll_until(Clock::now() + milliseconds(10000), {{listener.get(), POLLIN, 0}}));
  const std::optional<Descriptor> server = accept_from(listener);
  ASSERT_TRUE(server.has_value());
  ASSERT_EQ(::send(client.get(), "hello", 5, MSG_NOSIGNAL), 5);
  ASSERT_TRUE(poll_until(Clock::now() + milliseconds(10000), {{server->get(), POLLIN, 0}}));
  std::string received;
  EXPECT_EQ(read_available(server->get(), received), 5);
  EXPECT_EQ(received, "hello");
  EXPECT_FALSE(listen_on("127.0.0.1", port, why).is_open());
  EXPECT_EQ(why, "Address already in use");
}

TEST(Sockets, PairsAreConnected) {
  const auto [a, b] = socket_pair(SOCK_STREAM | SOCK_NONBLOCK, "problem");
  std::string received;
  EXPECT_EQ(read_available(b.get(), received), 0);
  ASSERT_EQ(::send(a.get(), "x", 1, MSG_NOSIGNAL), 1);
  EXPECT_EQ(read_available(b.get(), received), 1);
  EXPECT_THROW_WITH(socket_pair(12345, "problem"), Error, "problem: ");
}

}  // namespace
}  // namespace cohort
