#include "tests/apps/process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/inotify.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <thread>

namespace cohort::test {

namespace {

// The environment of this process, with the variables that inject `fault`.
std::vector<std::string> environment_with(const Fault& fault) {
  std::vector<std::string> out;
  for (char** entry = environ; *entry != nullptr; ++entry) out.emplace_back(*entry);
  if (fault.call.empty()) return out;
#if defined(__SANITIZE_THREAD__)  // its interceptors come first
  out.push_back("LD_PRELOAD=libtsan.so.2 " COHORT_FAULTS);
#else
  out.push_back("LD_PRELOAD=" COHORT_FAULTS);
#endif
  out.push_back("ASAN_OPTIONS=verify_asan_link_order=0");
  out.push_back(str("COHORT_FAULT=", fault.call, "|", fault.path, "|", fault.error, "|", fault.pass,
                    "|", fault.fail));
  return out;
}

std::vector<char*> pointers_to(std::vector<std::string>& texts) {
  std::vector<char*> out;
  for (std::string& text : texts) out.push_back(text.data());
  out.push_back(nullptr);
  return out;
}

}  // namespace

Process::Process(const std::vector<std::string>& arguments, const std::string& input,
                 const Fault& fault) {
  write_file(dir_.path("in"), input);
  std::vector<std::string> all{COHORT_BINARY};
  all.insert(all.end(), arguments.begin(), arguments.end());
  std::vector<std::string> environment = environment_with(fault);
  const std::vector<char*> argv = pointers_to(all), env = pointers_to(environment);
  const std::string paths[] = {dir_.path("in"), dir_.path("out"), dir_.path("err")};
  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ < 0) throw Error("cannot fork");
  if (pid_ == 0) {                        // only calls that are safe after fork()
    prctl(PR_SET_PDEATHSIG, SIGKILL);     // the process ends with a killed test
    if (getppid() != parent) _exit(127);  // the test has already ended
    for (int i = 0; i < 3; ++i) {
      const int fd = open(paths[i].c_str(), i == 0 ? O_RDONLY : O_WRONLY | O_CREAT | O_TRUNC, 0644);
      if (fd < 0 || dup2(fd, i) < 0) _exit(127);
    }
    execve(COHORT_BINARY, argv.data(), env.data());
    _exit(127);
  }
}

Process::~Process() {
  if (ended_) return;
  signal(SIGKILL);
  wait();
}

void Process::signal(int number) const {
  if (!ended_) kill(pid_, number);
}

bool Process::running() {
  if (!ended_) ended_ = waitpid(pid_, &status_, WNOHANG) == pid_;
  return !ended_;
}

std::string Process::out() const {
  return std::filesystem::exists(dir_.path("out")) ? read_file(dir_.path("out")) : "";
}

std::string Process::err() const {
  return std::filesystem::exists(dir_.path("err")) ? read_file(dir_.path("err")) : "";
}

bool Process::ignores(int number) const {
  const std::string status = read_file(str("/proc/", pid_, "/status")), name = "SigIgn:";
  const size_t at = status.find(name);
  return at != status.npos &&
         (std::stoull(status.substr(at + name.size()), nullptr, 16) >> (number - 1) & 1) != 0;
}

Output Process::wait() {
  while (!ended_) ended_ = waitpid(pid_, &status_, 0) == pid_;
  return {.code = WIFEXITED(status_) ? WEXITSTATUS(status_) : 128 + WTERMSIG(status_),
          .out = read_file(dir_.path("out")),
          .err = read_file(dir_.path("err"))};
}

Output run_cohort(const std::vector<std::string>& arguments, const std::string& input) {
  return Process(arguments, input).wait();
}

Output run_cohort_with(const Fault& fault, const std::vector<std::string>& arguments) {
  return Process(arguments, "", fault).wait();
}

FolderWatch::FolderWatch(const std::string& folder) : fd_(inotify_init1(IN_CLOEXEC)) {
  if (fd_ < 0 || inotify_add_watch(fd_, folder.c_str(), IN_CREATE | IN_MOVED_TO) < 0)
    throw Error("cannot watch " + folder + ": " + std::strerror(errno));
}

FolderWatch::~FolderWatch() {
  close(fd_);
}

bool FolderWatch::wait_for(const std::string& prefix, Process& process) {
  alignas(inotify_event) char buffer[4096];
  for (;;) {
    pollfd ready{.fd = fd_, .events = POLLIN, .revents = 0};
    if (poll(&ready, 1, 20) <= 0) {
      if (!process.running()) return false;
      continue;
    }
    const ssize_t size = read(fd_, buffer, sizeof buffer);
    for (ssize_t at = 0; at < size;) {
      const auto* event = reinterpret_cast<const inotify_event*>(buffer + at);
      if (event->len > 0 && std::string(event->name).rfind(prefix, 0) == 0) return true;
      at += static_cast<ssize_t>(sizeof(inotify_event) + event->len);
    }
  }
}

bool wait_for_path(const std::string& path, Process& process) {
  while (!std::filesystem::exists(path)) {
    if (!process.running()) return std::filesystem::exists(path);
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

bool have_tool(const std::string& name, const std::string& command) {
  if (std::system((command + " >/dev/null 2>&1").c_str()) == 0) return true;
  const char* require = std::getenv("COHORT_REQUIRE");
  if (require != nullptr && std::string(require).find(name) != std::string::npos)
    ADD_FAILURE() << "COHORT_REQUIRE requires " << name << ", which is missing: " << command;
  return false;
}

void expect_bad_input(const Output& output, const std::vector<std::string>& texts) {
  EXPECT_EQ(output.code, 2) << output.err;
  EXPECT_EQ(output.err.rfind("cohort: ", 0), 0u) << output.err;
  EXPECT_EQ(std::count(output.err.begin(), output.err.end(), '\n'), 1) << output.err;
  for (const std::string& text : texts)
    EXPECT_NE(output.err.find(text), std::string::npos)
        << "expected '" << text << "' in: " << output.err;
}

}  // namespace cohort::test
