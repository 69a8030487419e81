#include "sys/process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "sys/polling.h"

namespace cohort {
namespace {

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> out;
  for (const std::string& text : texts) out.push_back(const_cast<char*>(text.c_str()));
  out.push_back(nullptr);
  return out;
}

// Runs in the child, where only async-signal-safe calls are allowed. Writes the errno of a failure
// to `report`.
[[noreturn]] void become_program(const SpawnOptions& options, pid_t parent, char* const* argv,
                                 char* const* environment, int report) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(127);  // the parent has already exited
  for (int i = 0; i < 3; ++i) ::dup2(options.streams[static_cast<size_t>(i)], i);
  const auto bytes = static_cast<rlim_t>(options.memory);
  const rlimit limit{bytes, bytes};
  if ((options.directory.empty() || ::chdir(options.directory.c_str()) == 0) &&
      (options.memory == 0 || ::setrlimit(RLIMIT_AS, &limit) == 0))
    ::execvpe(argv[0], argv, environment);
  const int error = errno;
  ::_exit(::write(report, &error, sizeof error) < 0 ? 126 : 127);
}

}  // namespace

Pipe make_pipe() {
  int ends[2] = {-1, -1};
  if (::pipe2(ends, O_CLOEXEC) != 0) return {Descriptor(), Descriptor()};
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

void set_non_blocking(const Descriptor& descriptor) {
  ::fcntl(descriptor.get(), F_SETFL, O_NONBLOCK);
}

Spawned spawn(const SpawnOptions& options) {
  const std::vector<char*> argv = pointers(options.command);
  const std::vector<char*> variables = pointers(options.environment);
  char* const* const environment = options.environment.empty() ? environ : variables.data();
  Pipe report = make_pipe();
  if (!report.reading.is_open()) return {-1, errno};
  const pid_t parent = ::getpid(), id = ::fork();
  if (id < 0) return {-1, errno};
  if (id == 0) become_program(options, parent, argv.data(), environment, report.writing.get());
  ::setpgid(id, id);  // in parent and child, since either may run first
  report.writing.close();
  int error = 0;
  const ssize_t n = TEMP_FAILURE_RETRY(::read(report.reading.get(), &error, sizeof error));
  return {id, n == sizeof error ? error : 0};
}

std::optional<int> wait_for_exit(pid_t id, std::optional<std::chrono::milliseconds> limit) {
  const Clock::time_point start = Clock::now();
  for (;;) {
    int status = 0;
    const pid_t ended = ::waitpid(id, &status, limit ? WNOHANG : 0);
    if (ended == id) return status;
    if (ended < 0 && errno != EINTR) return 127 << 8;
    if (ended == 0 && Clock::now() - start >= *limit) return std::nullopt;
    if (ended == 0) ::usleep(1000);
  }
}

}  // namespace cohort
