#include "distributed/launcher.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <string_view>

#include "core/check.h"
#include "distributed/wire.h"

extern char** environ;

namespace cohort {
namespace {

using wire::Clock;

constexpr int kPollMs = 50;

// Environment of a rank: that of this process, except for variables set by another launcher.
std::vector<std::string> environment_of(int rank, int count, int port) {
  std::vector<std::string> out = {str("RANK=", rank),
                                  str("WORLD_SIZE=", count),
                                  str("LOCAL_RANK=", rank),
                                  str("LOCAL_WORLD_SIZE=", count),
                                  "MASTER_ADDR=127.0.0.1",
                                  str("MASTER_PORT=", port),
                                  "TORCHELASTIC_USE_AGENT_STORE="};
  const auto rank_variables = static_cast<std::ptrdiff_t>(out.size());
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry, name = text.substr(0, text.find('=') + 1);
    if (std::none_of(out.begin(), out.begin() + rank_variables,
                     [&](const std::string& variable) { return variable.starts_with(name); }))
      out.emplace_back(text);
  }
  return out;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> out;
  for (std::string& t : texts) out.push_back(t.data());
  out.push_back(nullptr);
  return out;
}

// Runs in the child, where only async-signal-safe calls are allowed. `output` receives stdout and
// stderr; -1 keeps those of this process.
[[noreturn]] void become_rank(pid_t parent, char* const* argv, char* const* envp, int input,
                              int output) {
  // A separate process group: only the launcher receives an interrupt from the terminal, and it
  // forwards the signal once.
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(127);  // the parent has already exited
  ::dup2(input, STDIN_FILENO);
  if (output >= 0) {
    ::dup2(output, STDOUT_FILENO);
    ::dup2(output, STDERR_FILENO);
  }
  ::execve(argv[0], argv, envp);
  ::_exit(127);
}

// Process of one rank.
struct Child {
  pid_t pid = -1;
  std::optional<int> status;  // set on exit
  Descriptor output;          // a pipe; none for rank 0
  std::string partial_line;
};

int code_of(int status) {
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

class Launcher {
 public:
  Launcher(const LaunchOptions& options, const std::atomic<bool>& stop)
      : options_(options), stop_(stop), children_(static_cast<size_t>(options.count)) {}
  ~Launcher() {
    signal_all(SIGKILL);
    for (Child& child : children_)
      if (child.pid > 0 && !child.status) ::waitpid(child.pid, nullptr, 0);
  }

  LaunchResult run() {
    const Descriptor input(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    const int port = wire::free_port();
    for (int rank = 0; rank < options_.count; ++rank) start(rank, port, input.get());
    while (!all_ended()) {
      wait_for_output();
      for (int rank = 0; rank < options_.count; ++rank) reap(rank);
      if (stop_ && !stop_sent_) {
        signal_all(SIGTERM);
        stop_sent_ = true;
      }
      if (first_failure_ && Clock::now() > *first_failure_ + options_.grace && !killed_) {
        for (int rank = 0; rank < options_.count; ++rank)
          if (!child(rank).status)
            add_message(
                str("rank ", rank, " was killed: it did not end after another rank had failed"));
        signal_all(SIGKILL);
        killed_ = true;
      }
    }
    for (int rank = 0; rank < options_.count; ++rank) read_output(rank);
    return result_;
  }

 private:
  Child& child(int rank) { return children_[static_cast<size_t>(rank)]; }

  void start(int rank, int port, int input) {
    std::vector<std::string> arguments = options_.command;
    std::vector<std::string> environment = environment_of(rank, options_.count, port);
    const std::vector<char*> argv = pointers(arguments), envp = pointers(environment);
    int ends[2] = {-1, -1};
    if (rank > 0 && ::pipe2(ends, O_CLOEXEC) != 0)
      throw Error(str("cannot create a pipe: ", std::strerror(errno)));
    const Descriptor write_end(ends[1]);
    child(rank).output = Descriptor(ends[0]);
    if (rank > 0) ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
    const pid_t parent = ::getpid(), pid = ::fork();
    if (pid < 0) throw Error(str("cannot start rank ", rank, ": ", std::strerror(errno)));
    if (pid == 0) become_rank(parent, argv.data(), envp.data(), input, write_end.get());
    child(rank).pid = pid;
  }

  bool all_ended() const {
    return std::all_of(children_.begin(), children_.end(),
                       [](const Child& c) { return c.status.has_value(); });
  }

  void signal_all(int signal) const {
    for (const Child& c : children_)
      if (c.pid > 0 && !c.status) ::kill(c.pid, signal);
  }

  void wait_for_output() {
    std::vector<pollfd> fds;
    for (const Child& c : children_)
      if (c.output.is_open()) fds.push_back({c.output.get(), POLLIN, 0});
    ::poll(fds.data(), fds.size(), kPollMs);
    for (int rank = 0; rank < options_.count; ++rank) read_output(rank);
  }

  void read_output(int rank) {
    Child& c = child(rank);
    char buffer[4096];
    while (c.output.is_open()) {
      const ssize_t n = ::read(c.output.get(), buffer, sizeof buffer);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return;  // no data yet
      if (n == 0) c.output = Descriptor();
      c.partial_line.append(buffer, static_cast<size_t>(n));
      for (size_t end; (end = c.partial_line.find('\n')) != std::string::npos;
           c.partial_line.erase(0, end + 1))
        forward_line(rank, c.partial_line.substr(0, end));
      if (n == 0 && !c.partial_line.empty()) forward_line(rank, std::exchange(c.partial_line, {}));
    }
  }

  void forward_line(int rank, const std::string& line) const {
    if (options_.on_line) options_.on_line(rank, line);
  }

  void reap(int rank) {
    Child& c = child(rank);
    int status = 0;
    if (c.status || ::waitpid(c.pid, &status, WNOHANG) != c.pid) return;
    c.status = status;
    const int code = code_of(status);
    if (code == 0) return;
    if (!first_failure_) first_failure_ = Clock::now();
    // A rank that ends because of a peer may exit before the rank that caused the failure.
    if (result_.code == 0 ||
        (result_.code == options_.exit_code_of_peer && code != options_.exit_code_of_peer))
      result_.code = code;
    if (WIFSIGNALED(status) && !killed_)
      add_message(str("rank ", rank, " was terminated by signal ", WTERMSIG(status), " (",
                      ::strsignal(WTERMSIG(status)), ")"));
  }

  void add_message(const std::string& text) {
    result_.message += (result_.message.empty() ? "" : "; ") + text;
  }

  const LaunchOptions& options_;
  const std::atomic<bool>& stop_;
  std::vector<Child> children_;
  LaunchResult result_;
  std::optional<Clock::time_point> first_failure_;
  bool stop_sent_ = false, killed_ = false;
};

}  // namespace

LaunchResult launch_ranks(const LaunchOptions& options, const std::atomic<bool>& stop) {
  COHORT_CHECK(options.count >= 1 && !options.command.empty(),
               "[launch_ranks] expected a command and at least one rank, got ", options.count);
  return Launcher(options, stop).run();
}

}  // namespace cohort
