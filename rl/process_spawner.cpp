#include "rl/process_spawner.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>

#include "core/log.h"
#include "sys/files.h"
#include "sys/input_file.h"
#include "sys/polling.h"
#include "sys/process.h"
#include "sys/sockets.h"
#include "text/utf8.h"

namespace cohort {
namespace {

// A request is one packet: a SpawnRequest, then null-terminated strings. A start passes three file
// descriptors: the program's standard input, output and error.
enum class Command : int32_t { kStart, kEnd };
struct SpawnRequest {
  Command command = Command::kStart;
  pid_t id = -1;
  int64_t memory = 0;
  // Strings of the command line; the directory and then the names of hidden variables follow.
  int32_t num_arguments = 0, num_hidden = 0;
  int32_t errors_to_log = 0;  // 1: its standard error is a log, which may be truncated
  int32_t patience = 0;       // milliseconds until a program is killed
};
struct Reply {
  int32_t value = 0;   // pid or wait status
  int32_t error = 0;   // errno
  int32_t killed = 0;  // 1: the program was running until it was killed
};
constexpr size_t kMaxPacket = 128 << 10;
constexpr int kStreams = 3;
constexpr int64_t kMaxLog = 256 << 20;
constexpr const char* kTruncated =
    "(cohort: this log was longer than 256 MB, and begins again here)\n";

// A packet as sendmsg() and recvmsg() take it, with room for the descriptors of the streams.
struct Message : NonCopyable {
  Message(void* bytes, size_t size) : data{bytes, size} {
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
  }
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int[kStreams]))] = {};
  iovec data;
  msghdr header{};
};

// ---- In the spawner

// The children of this process, including the orphans that it has adopted as subreaper.
std::vector<pid_t> children() {
  std::vector<pid_t> out;
  std::ifstream file("/proc/thread-self/children");
  for (pid_t id; file >> id;) out.push_back(id);
  return out;
}

// True if a child has ended, or ends within `patience`. It is not reaped, so its id is not reused.
bool ends_within(pid_t id, std::chrono::milliseconds patience) {
  const Clock::time_point end = Clock::now() + patience;
  for (;;) {
    siginfo_t info{};
    if (::waitid(P_PID, static_cast<id_t>(id), &info, WEXITED | WNOHANG | WNOWAIT) != 0)
      return false;
    if (info.si_pid == id) return true;
    if (Clock::now() >= end) return false;
    ::usleep(1000);
  }
}

class Spawner {
 public:
  explicit Spawner(int socket) : socket_(socket) {}

  [[noreturn]] void serve() {
    std::vector<char> packet(kMaxPacket);
    for (;;) {
      if (!poll_until(Clock::now() + std::chrono::seconds(1), {{socket_, POLLIN, 0}}))
        reap_and_limit_log();
      else if (!serve_one(packet))
        break;
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
    Message message(packet.data(), packet.size());
    const ssize_t size = ::recvmsg(socket_, &message.header, MSG_CMSG_CLOEXEC);
    if (size < 0 && errno == EINTR) return true;
    SpawnRequest request;
    if (size < static_cast<ssize_t>(sizeof request)) return false;
    std::memcpy(&request, packet.data(), sizeof request);
    Reply reply{-1, EMFILE};
    if (request.command == Command::kEnd)
      reply = end_program(request.id, std::chrono::milliseconds(request.patience));
    else if ((message.header.msg_flags & MSG_CTRUNC) == 0)
      reply = start_program(request, {packet.data() + sizeof request, packet.data() + size},
                            CMSG_DATA(CMSG_FIRSTHDR(&message.header)));
    reap_and_limit_log();
    return ::send(socket_, &reply, sizeof reply, MSG_NOSIGNAL) == sizeof reply;
  }

  // `texts`: the strings of the request; `streams`: the bytes of its descriptors.
  Reply start_program(const SpawnRequest& request, std::string_view texts, const void* streams) {
    SpawnOptions program{.memory = request.memory};
    std::memcpy(program.streams.data(), streams, sizeof program.streams);
    Descriptor owned[kStreams];
    for (size_t i = 0; i < kStreams; ++i) owned[i] = Descriptor(program.streams[i]);
    for (int i = 0; i < request.num_arguments; ++i, texts.remove_prefix(texts.find('\0') + 1))
      program.command.emplace_back(texts.data());
    program.directory = texts.data();
    for (int i = 0; i < request.num_hidden; ++i) {
      texts.remove_prefix(texts.find('\0') + 1);
      ::unsetenv(texts.data());
    }
    const Spawned spawned = spawn(program);
    if (request.errors_to_log != 0) log_ = std::move(owned[STDERR_FILENO]);
    if (spawned.error == 0) {
      programs_.push_back(spawned.id);
      return {spawned.id, 0};
    }
    if (spawned.id > 0) wait_for_exit(spawned.id);
    return {-1, spawned.error};
  }

  Reply end_program(pid_t id, std::chrono::milliseconds patience) {
    const bool ended = ends_within(id, patience);
    ::kill(-id, SIGKILL);
    ::kill(id, SIGKILL);  // it may have left its group
    std::erase(programs_, id);
    // A process in uninterruptible sleep (driver, dead disk) does not die in time and is given up.
    const std::optional<int> status = wait_for_exit(id, std::chrono::seconds(2));
    return status ? Reply{*status, 0, !ended} : Reply{0, ETIMEDOUT, 1};
  }

  void reap_and_limit_log() {
    // Programs themselves are reaped by end_program() only, so that their process ids are not
    // reused.
    for (const pid_t id : children())
      if (std::ranges::find(programs_, id) == programs_.end()) ::waitpid(id, nullptr, WNOHANG);
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

[[noreturn]] void become_spawner(int socket) {
  ::setpgid(0, 0);  // not interrupted by Ctrl-C in the terminal
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  ::prctl(PR_SET_NAME, "spawner");  // survives `killall -9 cohort`
  // They have no effect here, and their default effect in the programs: an exec resets handlers.
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGPIPE, SIGXFSZ}) ::signal(signal, [](int) {});
  ::signal(SIGCHLD, SIG_DFL);  // an inherited SIG_IGN would discard exit statuses
  ::dup2(socket, kStreams);
  if (::close_range(kStreams + 1, ~0U, 0) != 0)  // before Linux 5.9
    for (long fd = ::sysconf(_SC_OPEN_MAX); fd > kStreams; --fd) ::close(static_cast<int>(fd));
  ::fcntl(kStreams, F_SETFD, FD_CLOEXEC);
  Spawner(kStreams).serve();
}

// ---- In this process

// The pipe of a stream of a program. `ours`, the end of this process, does not block.
Pipe make_stream(Descriptor Pipe::*ours) {
  Pipe pipe = make_pipe();
  if (!pipe.reading.is_open())
    throw InputError(str("cannot make a pipe to a program: ", system_reason(),
                         "; hint: fewer workers, or a higher limit (ulimit -n)"));
  set_non_blocking(pipe.*ours);
  return pipe;
}

// Waits until the spawner has replied or ended.
void wait_for_reply(int socket, pid_t spawner) {
  constexpr int kMaxSeconds = 60;
  for (int i = 0; i < kMaxSeconds; ++i) {
    if (poll_until(Clock::now() + std::chrono::seconds(1), {{socket, POLLIN, 0}})) return;
    siginfo_t info{};
    if (::waitid(P_PID, static_cast<id_t>(spawner), &info, WSTOPPED | WNOHANG) != 0 ||
        info.si_pid != spawner)
      continue;
    logging::warn("the process that starts programs (", spawner, ") was stopped, and is continued");
    ::kill(spawner, SIGCONT);
  }
  throw Error(str("the process that starts programs (", spawner, ") has not answered in ",
                  kMaxSeconds, " s; hint: kill it, and start again"));
}

Reply send_request(int socket, pid_t spawner, std::string packet, const int* streams) {
  Message message(packet.data(), packet.size());
  if (streams != nullptr) {
    cmsghdr* header = CMSG_FIRSTHDR(&message.header);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int[kStreams]));
    std::memcpy(CMSG_DATA(header), streams, sizeof(int[kStreams]));
  } else {
    message.header.msg_controllen = 0;
  }
  Reply reply;
  ssize_t received = -1;
  if (::sendmsg(socket, &message.header, MSG_NOSIGNAL) == static_cast<ssize_t>(packet.size())) {
    wait_for_reply(socket, spawner);
    received = ::recv(socket, &reply, sizeof reply, 0);  // does not block
  }
  if (received != sizeof reply)
    throw Error("the process that starts programs has ended; hint: was it killed?");
  return reply;
}

// The last 4096 bytes of a log that has grown since it had `size` bytes, without blanks and line
// breaks at the end; "" for any failure.
std::string end_of_log(const std::string& log, int64_t size) {
  constexpr int64_t kMax = 4096;
  try {
    const InputFile file(log);
    if (file.size() <= size) return "";
    std::string text = file.read(std::max<int64_t>(size, file.size() - kMax), file.size());
    text.erase(text.find_last_not_of(" \r\n") + 1);
    return text;
  } catch (const Error&) {  // it was removed, or is emptied at this moment
    return "";
  }
}

// "; the last line of LOG: 'KeyError'" for end_of_log().
std::string last_line(const std::string& log, int64_t size) {
  std::string text = end_of_log(log, size);
  text.erase(0, text.rfind('\n') + 1);
  if (text.empty()) return "";
  return str("; the last line of ", std::filesystem::path(log).filename().string(), ": ",
             excerpt(text, 160, 80));
}

std::mutex hidden_mutex;
std::set<std::string> hidden_variables;

std::string as_packet(const SpawnRequest& request) {
  return {reinterpret_cast<const char*>(&request), sizeof request};
}

}  // namespace

ProcessSpawner::ProcessSpawner() {
  auto [ours, spawner_end] = socket_pair(SOCK_SEQPACKET, "cannot make a socket");
  socket_ = std::move(ours);
  spawner_ = ::fork();
  if (spawner_ < 0) throw_errno("cannot start a process");
  if (spawner_ == 0) become_spawner(spawner_end.get());
}

ProcessSpawner::~ProcessSpawner() {
  socket_.close();
  ::kill(spawner_, SIGCONT);  // it may be stopped
  if (!wait_for_exit(spawner_, std::chrono::seconds(15))) ::kill(spawner_, SIGKILL);
}

ProcessSpawner::Started ProcessSpawner::start(const Program& program) {
  const std::lock_guard lock(mutex_);
  Pipe input = make_stream(&Pipe::writing), output = make_stream(&Pipe::reading);
  Descriptor log;
  int64_t log_size = 0;
  if (!log_.empty()) {
    log_size = std::max<int64_t>(0, readable_size(log_));
    log = Descriptor(::open(log_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
    if (!log.is_open()) throw_errno<InputError>(log_, " cannot be opened");
  }
  const std::lock_guard hidden_lock(hidden_mutex);
  std::string packet = as_packet({.command = Command::kStart,
                                  .memory = program.memory,
                                  .num_arguments = static_cast<int32_t>(program.command.size()),
                                  .num_hidden = static_cast<int32_t>(hidden_variables.size()),
                                  .errors_to_log = log.is_open()});
  for (const std::string& argument : program.command) packet.append(argument).push_back('\0');
  packet.append(program.directory).push_back('\0');
  for (const std::string& name : hidden_variables) packet.append(name).push_back('\0');
  if (packet.size() > kMaxPacket) throw InputError("the command is longer than 128 kB");
  const int streams[] = {input.reading.get(), output.writing.get(),
                         log.is_open() ? log.get() : STDERR_FILENO};
  const Reply reply = send_request(socket_.get(), spawner_, packet, streams);
  if (reply.error != 0)
    throw InputError(str("cannot run '", program.command[0], "': ", system_reason(reply.error)));
  log_sizes_[reply.value] = log_size;
  return {reply.value, std::move(input.writing), std::move(output.reading)};
}

void ProcessSpawner::hide_variables(const std::vector<std::string>& names) {
  const std::lock_guard lock(hidden_mutex);
  hidden_variables.insert(names.begin(), names.end());
}

void ProcessSpawner::set_log(const std::string& path, bool quotes) {
  const std::lock_guard lock(mutex_);
  log_ = path;
  quotes_log_ = quotes;
}

std::string ProcessSpawner::end(pid_t id, std::chrono::milliseconds patience) {
  const std::lock_guard lock(mutex_);
  const auto node = log_sizes_.extract(id);
  const auto [status, error, killed] = send_request(
      socket_.get(), spawner_,
      as_packet(
          {.command = Command::kEnd, .id = id, .patience = static_cast<int32_t>(patience.count())}),
      nullptr);
  if (error != 0) return "(it cannot be killed)";
  if (killed != 0) return "(ended by cohort)";
  const std::string line =
      log_.empty() || !quotes_log_ || node.empty() ? "" : last_line(log_, node.mapped());
  return WIFEXITED(status) ? str("(exit code ", WEXITSTATUS(status), ")", line)
                           : str("(signal ", WTERMSIG(status), ")", line);
}

ErrorCapture::ErrorCapture(ProcessSpawner& spawner)
    : spawner_(spawner), file_(::memfd_create("workers", MFD_CLOEXEC)) {
  if (!file_.is_open()) throw_errno("cannot keep the output of programs");
  spawner_.set_log(str("/proc/self/fd/", file_.get()), /*quotes=*/false);
}

std::string ErrorCapture::last_lines() const {
  std::string text = end_of_log(str("/proc/self/fd/", file_.get()), 0);
  size_t begin = text.size();
  for (int i = 0; i < 10 && begin != text.npos && begin > 0; ++i)
    begin = text.rfind('\n', begin - 1);
  if (begin != text.npos && begin > 0) text.erase(0, begin + 1);
  return text.empty() ? "" : "\n    " + replaced(text, "\n", "\n    ");
}

ProcessSpawner& process_spawner() {
  static ProcessSpawner spawner;
  return spawner;
}

}  // namespace cohort
