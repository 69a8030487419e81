#include "distributed/launcher.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <random>
#include <string_view>

#include "sys/polling.h"
#include "sys/process.h"
#include "sys/sockets.h"

namespace cohort {
namespace {

constexpr std::chrono::milliseconds kPollInterval{50};

// The environment variables of a rank: those of this process, except for what another launcher has
// set.
std::vector<std::string> environment_of(int rank, int count, int port, const std::string& run) {
  std::vector<std::string> out = {str("RANK=", rank),           str("WORLD_SIZE=", count),
                                  str("LOCAL_RANK=", rank),     str("LOCAL_WORLD_SIZE=", count),
                                  "MASTER_ADDR=127.0.0.1",      str("MASTER_PORT=", port),
                                  "TORCHELASTIC_RUN_ID=" + run, "TORCHELASTIC_USE_AGENT_STORE="};
  const auto rank_variables = static_cast<std::ptrdiff_t>(out.size());
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry, name = text.substr(0, text.find('=') + 1);
    if (std::none_of(out.begin(), out.begin() + rank_variables,
                     [&](const std::string& variable) { return variable.starts_with(name); }))
      out.emplace_back(text);
  }
  return out;
}

// Process of one rank.
struct Rank {
  int number = 0;
  pid_t id = -1;
  std::optional<int> status;  // set on exit
  Descriptor output;          // a pipe; none for rank 0
  std::string partial_line;
};

class Launcher {
 public:
  Launcher(const LaunchOptions& options, const std::atomic<bool>& stop)
      : options_(options), stop_(stop), ranks_(static_cast<size_t>(options.count)) {}
  ~Launcher() {
    signal_all(SIGKILL);
    for (Rank& rank : ranks_)
      if (rank.id > 0 && !rank.status) wait_for_exit(rank.id);
  }

  LaunchResult run() {
    const Descriptor input(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    const int port = free_port();
    const std::string run = str("cohort-", std::random_device()());  // another may use the port too
    for (size_t i = 0; i < ranks_.size(); ++i) {
      ranks_[i].number = static_cast<int>(i);
      start(ranks_[i], environment_of(ranks_[i].number, options_.count, port, run), input.get());
    }
    const auto has_ended = [](const Rank& rank) { return rank.status.has_value(); };
    while (!std::all_of(ranks_.begin(), ranks_.end(), has_ended)) {
      wait_for_output();
      for (Rank& rank : ranks_) reap(rank);
      if (stop_ && !std::exchange(stop_sent_, true)) signal_all(SIGTERM);
      if (first_failure_ && Clock::now() > *first_failure_ + options_.grace && !killed_) {
        for (const Rank& rank : ranks_)
          if (!rank.status)
            add_message(str("rank ", rank.number,
                            " was killed: it did not end after another rank had failed"));
        signal_all(SIGKILL);
        killed_ = true;
      }
    }
    for (Rank& rank : ranks_) read_output(rank);
    return result_;
  }

 private:
  // Only the launcher receives an interrupt from the terminal, and it forwards the signal once.
  void start(Rank& rank, const std::vector<std::string>& environment, int input) {
    SpawnOptions program{.command = options_.command, .environment = environment};
    program.streams[0] = input;
    Descriptor writing;
    if (rank.number > 0) {
      Pipe output = make_pipe();
      if (!output.reading.is_open()) throw_errno("cannot create a pipe");
      set_non_blocking(output.reading);
      rank.output = std::move(output.reading);
      writing = std::move(output.writing);
      program.streams = {input, writing.get(), writing.get()};
    }
    const Spawned spawned = spawn(program);
    if (spawned.id < 0)
      throw Error(str("cannot start rank ", rank.number, ": ", system_reason(spawned.error)));
    rank.id = spawned.id;
  }

  void signal_all(int signal) const {
    for (const Rank& rank : ranks_)
      if (rank.id > 0 && !rank.status) ::kill(rank.id, signal);
  }

  void wait_for_output() {
    std::vector<pollfd> fds;
    for (const Rank& rank : ranks_) fds.push_back({rank.output.get(), POLLIN, 0});
    poll_until(Clock::now() + kPollInterval, std::move(fds));
    for (Rank& rank : ranks_) read_output(rank);
  }

  void read_output(Rank& rank) const {
    std::string& text = rank.partial_line;
    while (rank.output.is_open()) {
      const ssize_t n = read_available(rank.output.get(), text);
      if (n == 0) return;
      if (n < 0) rank.output.close();
      if (n < 0 && !text.empty()) text += '\n';
      for (size_t end; (end = text.find('\n')) != text.npos; text.erase(0, end + 1))
        if (options_.on_line) options_.on_line(rank.number, text.substr(0, end));
    }
  }

  void reap(Rank& rank) {
    if (rank.status) return;
    rank.status = wait_for_exit(rank.id, std::chrono::milliseconds(0));
    if (!rank.status || *rank.status == 0) return;
    const bool exited = WIFEXITED(*rank.status);
    const int code = exited ? WEXITSTATUS(*rank.status) : 128 + WTERMSIG(*rank.status);
    if (!first_failure_) first_failure_ = Clock::now();
    // A rank that ends because of a peer may exit before the rank that caused the failure.
    if (result_.code == 0 ||
        (result_.code == options_.exit_code_of_peer && code != options_.exit_code_of_peer))
      result_.code = code;
    const bool obeys = stop_sent_ && code == 128 + SIGTERM;
    if (!exited && !killed_ && !obeys)
      add_message(str("rank ", rank.number, " was terminated by signal ", code - 128, " (",
                      ::strsignal(code - 128), ")"));
  }

  void add_message(const std::string& text) {
    result_.message += (result_.message.empty() ? "" : "; ") + text;
  }

  const LaunchOptions& options_;
  const std::atomic<bool>& stop_;
  std::vector<Rank> ranks_;
  LaunchResult result_;
  std::optional<Clock::time_point> first_failure_;
  bool stop_sent_ = false, killed_ = false;
};

}  // namespace

LaunchResult launch_ranks(const LaunchOptions& options, const std::atomic<bool>& stop) {
  COHORT_CHECK(options.count >= 1 && !options.command.empty(),
               "[launch_ranks] expected a command and at least one rank, got ", options.count);
  LaunchResult result = Launcher(options, stop).run();
  const auto is_final = [&] {
    return stop || result.code == 0 || std::ranges::count(options.final_codes, result.code) > 0;
  };
  for (int restart = 0; restart < options.restarts && !is_final(); ++restart) {
    if (options.on_restart) options.on_restart(result);
    result = Launcher(options, stop).run();
  }
  return result;
}

}  // namespace cohort
