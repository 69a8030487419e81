#include "rl/worker_host.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "core/check.h"

namespace cohort {
namespace {

// A request is one packet: a Request, then null-terminated strings. A start passes three file
// descriptors: the program's standard input, output and error.
enum class Command : int32_t { kStart, kEnd };
struct Request {
  Command command = Command::kStart;
  pid_t id = -1;
  int64_t memory = 0;
  int32_t num_arguments = 0;  // strings of the command line; the directory follows them
  int32_t errors_to_log = 0;  // 1: its standard error is a log, which may be truncated
};
struct Reply {
  int32_t value = 0;  // pid or wait status
  int32_t error = 0;  // errno
};
constexpr size_t kMaxPacket = 128 << 10;
constexpr int kStreams = 3;
constexpr int64_t kMaxLog = 256 << 20;
constexpr const char* kTruncated =
    "(cohort: this log was longer than 256 MB, and begins again here)\n";

// ---- In the host

[[noreturn]] void become_program(const Request& request, const std::vector<char*>& texts,
                                 const int (&streams)[kStreams], int report) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGPIPE, SIGXFSZ}) ::signal(signal, SIG_DFL);
  for (int i = 0; i < kStreams; ++i) ::dup2(streams[i], i);
  const char* directory = texts[static_cast<size_t>(request.num_arguments)];
  std::vector<char*> argv(texts.begin(), texts.begin() + request.num_arguments);
  argv.push_back(nullptr);
  const auto bytes = static_cast<rlim_t>(request.memory);
  const rlimit limit{bytes, bytes};
  if ((*directory == '\0' || ::chdir(directory) == 0) &&
      (request.memory == 0 || ::setrlimit(RLIMIT_AS, &limit) == 0))
    ::execvp(argv[0], argv.data());
  const int error = errno;
  if (::write(report, &error, sizeof error) < 0) ::_exit(126);
  ::_exit(127);
}

Reply start_program(const Request& request, const std::vector<char*>& texts,
                    const int (&streams)[kStreams]) {
  int report[2];
  if (::pipe2(report, O_CLOEXEC) != 0) return {-1, errno};
  const Descriptor reading(report[0]);
  Descriptor writing(report[1]);
  const pid_t id = ::fork();
  if (id < 0) return {-1, errno};
  if (id == 0) become_program(request, texts, streams, report[1]);
  ::setpgid(id, id);  // in parent and child, since either may run first
  writing.close();
  int error = 0;
  if (::read(report[0], &error, sizeof error) != sizeof error) return {id, 0};
  ::waitpid(id, nullptr, 0);
  return {-1, error};
}

// The children of this process, including the orphans that it has adopted as subreaper.
std::vector<pid_t> children() {
  std::vector<pid_t> out;
  std::ifstream file("/proc/thread-self/children");
  for (pid_t id; file >> id;) out.push_back(id);
  return out;
}

class Host {
 public:
  explicit Host(int socket) : socket_(socket) {}

  [[noreturn]] void serve() {
    std::vector<char> packet(kMaxPacket);
    for (;;) {
      pollfd waiting{socket_, POLLIN, 0};
      if (::poll(&waiting, 1, 1000) == 0) {
        reap_and_limit_log();
        continue;
      }
      if (!serve_one(packet)) break;
    }
    ::alarm(10);  // processes that cannot be killed must not delay the end of the run
    for (const pid_t id : programs_) ::kill(-id, SIGKILL);
    for (;;) {
      for (const pid_t id : children()) ::kill(id, SIGKILL);
      if (::waitpid(-1, nullptr, 0) < 0 && errno == ECHILD) ::_exit(0);
    }
  }

 private:
  bool serve_one(std::vector<char>& packet) {
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int[kStreams]))];
    iovec data{packet.data(), packet.size()};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const ssize_t size = ::recvmsg(socket_, &message, MSG_CMSG_CLOEXEC);
    if (size < 0 && errno == EINTR) return true;
    Request request;
    if (size < static_cast<ssize_t>(sizeof request)) return false;
    std::memcpy(&request, packet.data(), sizeof request);
    Reply reply;
    if (request.command == Command::kEnd) {
      reply = end_program(request.id);
    } else if ((message.msg_flags & MSG_CTRUNC) != 0) {
      reply = {-1, EMFILE};
    } else {
      Descriptor owned[kStreams];
      int streams[kStreams];
      std::memcpy(streams, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof streams);
      for (int i = 0; i < kStreams; ++i) owned[i] = Descriptor(streams[i]);
      std::vector<char*> texts;
      for (char* text = packet.data() + sizeof request; text < packet.data() + size;
           text += std::strlen(text) + 1)
        texts.push_back(text);
      reply = start_program(request, texts, streams);
      if (reply.value > 0) programs_.push_back(reply.value);
      if (request.errors_to_log != 0) log_ = std::move(owned[STDERR_FILENO]);
    }
    reap_and_limit_log();
    return ::send(socket_, &reply, sizeof reply, MSG_NOSIGNAL) == sizeof reply;
  }

  Reply end_program(pid_t id) {
    ::kill(-id, SIGKILL);
    ::kill(id, SIGKILL);  // it may have left its group
    std::erase(programs_, id);
    // A process in uninterruptible sleep (driver, dead disk) does not die in time and is given up.
    for (int i = 0; i < 2000; ++i) {
      int status = 0;
      if (::waitpid(id, &status, WNOHANG) != 0) return {status, 0};
      ::usleep(1000);
    }
    return {0, ETIMEDOUT};
  }

  void reap_and_limit_log() {
    // Programs themselves are reaped by end_program() only, so that their process ids are not
    // reused.
    for (const pid_t id : children())
      if (std::find(programs_.begin(), programs_.end(), id) == programs_.end())
        ::waitpid(id, nullptr, WNOHANG);
    // A program must not fill the disk through its log.
    struct stat status;
    if (log_.is_open() && ::fstat(log_.get(), &status) == 0 && status.st_size > kMaxLog &&
        ::ftruncate(log_.get(), 0) == 0 &&
        ::write(log_.get(), kTruncated, std::strlen(kTruncated)) < 0)
      log_.close();
  }

  const int socket_;
  std::vector<pid_t> programs_;
  Descriptor log_;
};

[[noreturn]] void become_host(int socket) {
  ::setpgid(0, 0);  // not interrupted by Ctrl-C in the terminal
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  ::prctl(PR_SET_NAME, "reward-host");  // survives `killall -9 cohort`
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) ::signal(signal, SIG_IGN);
  ::signal(SIGCHLD, SIG_DFL);  // an inherited SIG_IGN would discard exit statuses
  ::dup2(socket, kStreams);
  if (::close_range(kStreams + 1, ~0U, 0) != 0)  // before Linux 5.9
    for (long fd = ::sysconf(_SC_OPEN_MAX); fd > kStreams; --fd) ::close(static_cast<int>(fd));
  ::fcntl(kStreams, F_SETFD, FD_CLOEXEC);
  Host(kStreams).serve();
}

// ---- In this process

struct Pipe {
  Pipe() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0)
      throw InputError(str("cannot make a pipe to a reward program: ", std::strerror(errno),
                           "; hint: fewer workers, or a higher limit (ulimit -n)"));
    reading = Descriptor(ends[0]);
    writing = Descriptor(ends[1]);
  }
  Descriptor reading, writing;
};

Reply send_request(int socket, const std::string& packet, const int* streams) {
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int[kStreams]))] = {};
  iovec data{const_cast<char*>(packet.data()), packet.size()};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (streams != nullptr) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int[kStreams]));
    std::memcpy(CMSG_DATA(header), streams, sizeof(int[kStreams]));
  }
  Reply reply;
  ssize_t received = -1;
  if (::sendmsg(socket, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(packet.size())) do
      received = ::recv(socket, &reply, sizeof reply, 0);
    while (received < 0 && errno == EINTR);
  if (received != sizeof reply)
    throw Error("the process that starts reward programs has ended; hint: was it killed?");
  return reply;
}

std::string as_packet(const Request& request) {
  return {reinterpret_cast<const char*>(&request), sizeof request};
}

}  // namespace

WorkerHost::WorkerHost() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
    throw Error(str("cannot make a socket: ", std::strerror(errno)));
  socket_ = Descriptor(ends[0]);
  const Descriptor host_end(ends[1]);
  host_ = ::fork();
  if (host_ < 0) throw Error(str("cannot start a process: ", std::strerror(errno)));
  if (host_ == 0) become_host(ends[1]);
}

WorkerHost::~WorkerHost() {
  socket_.close();
  while (::waitpid(host_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

WorkerHost::Started WorkerHost::start(const Program& program) {
  const std::lock_guard lock(mutex_);
  Pipe input, output;
  Descriptor log;
  if (!log_.empty()) {
    log = Descriptor(::open(log_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
    if (!log.is_open()) throw InputError(str(log_, " cannot be opened: ", std::strerror(errno)));
  }
  std::string packet = as_packet({.command = Command::kStart,
                                  .memory = program.memory,
                                  .num_arguments = static_cast<int32_t>(program.command.size()),
                                  .errors_to_log = log.is_open()});
  for (const std::string& argument : program.command) packet.append(argument).push_back('\0');
  packet.append(program.directory).push_back('\0');
  if (packet.size() > kMaxPacket) throw InputError("the command is longer than 128 kB");
  const int streams[] = {input.reading.get(), output.writing.get(),
                         log.is_open() ? log.get() : STDERR_FILENO};
  const Reply reply = send_request(socket_.get(), packet, streams);
  if (reply.error != 0)
    throw InputError(str("cannot run '", program.command[0], "': ", std::strerror(reply.error)));
  for (const int fd : {input.writing.get(), output.reading.get()}) ::fcntl(fd, F_SETFL, O_NONBLOCK);
  return {reply.value, std::move(input.writing), std::move(output.reading)};
}

void WorkerHost::set_log(const std::string& path) {
  const std::lock_guard lock(mutex_);
  log_ = path;
}

std::string WorkerHost::end(pid_t id) {
  const std::lock_guard lock(mutex_);
  const auto [status, error] =
      send_request(socket_.get(), as_packet({.command = Command::kEnd, .id = id}), nullptr);
  if (error != 0) return "it cannot be killed";
  return WIFEXITED(status) ? str("exit code ", WEXITSTATUS(status))
                           : str("signal ", WTERMSIG(status));
}

WorkerHost& worker_host() {
  static WorkerHost host;
  return host;
}

}  // namespace cohort
