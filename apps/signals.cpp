#include "apps/signals.h"

#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <string_view>

#include "apps/commands.h"
#include "job/stage.h"

namespace cohort::apps {
namespace {

// Messages after the first request to stop, by RunProgress.
constexpr std::string_view kFirstMessages[] = {
    "cohort: ended at once: there was nothing new to save\n",
    "cohort: saving at the end of this step; press Ctrl-C again twice to end at once\n",
    "cohort: ending this evaluation, then saving; press Ctrl-C again twice to end at once\n",
    "cohort: the run is saved and about to end\n"};
constexpr std::string_view kWaitMessage =
    "cohort: not done yet, please wait; press Ctrl-C once more to end without saving\n";
// On a terminal a message replaces the progress line.
constexpr std::string_view kClear = "\r\033[K";

std::atomic<bool> g_stop{false}, g_terminal{false};
std::atomic<int> g_requests{0};
std::atomic<SignalVerbosity> g_verbosity{SignalVerbosity::kNone};
static_assert(std::atomic<SignalVerbosity>::is_always_lock_free);

// Ends the process as the signal does by default, once its handler has returned.
void end_by(int signal) {
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

bool ends_at_once(RunProgress progress) {
  return progress == RunProgress::kNothingToSave && g_verbosity != SignalVerbosity::kWaitNotice;
}

// Async-signal-safe.
void print_message(std::string_view text) {
  const int before = errno;
  // Write errors are ignored.
  if (g_terminal && write(STDERR_FILENO, kClear.data(), kClear.size()) < 0) errno = before;
  if (write(STDERR_FILENO, text.data(), text.size()) < 0) errno = before;
}

extern "C" void end_interrupted(int) {
  _exit(kInterrupted);
}

extern "C" void on_interrupt(int) {
  if (g_stop.exchange(true)) _exit(kInterrupted);
}

extern "C" void on_hangup(int signal) {
  if (ends_at_once(run_progress())) return end_by(signal);
  g_stop = true;
}

extern "C" void on_request(int signal) {
  const RunProgress progress = run_progress();
  const bool ends = ends_at_once(progress);
  g_stop = true;
  switch (g_requests.fetch_add(1)) {
    case 0:
      if (g_verbosity == SignalVerbosity::kAll)
        print_message(kFirstMessages[static_cast<size_t>(progress)]);
      break;
    case 1:
      if (!ends && g_verbosity != SignalVerbosity::kNone) print_message(kWaitMessage);
      break;
    default:
      return end_by(signal);
  }
  if (ends) end_by(signal);
}

}  // namespace

void set_signals() {
  std::signal(SIGTERM, end_interrupted);
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
}

std::atomic<bool>& interrupt_request() {
  std::signal(SIGINT, on_interrupt);
  return g_stop;
}

const std::atomic<bool>& stop_on_signals(SignalVerbosity verbosity) {
  g_verbosity = verbosity;
  g_terminal = isatty(STDERR_FILENO) == 1;
  std::signal(SIGINT, on_request);
  std::signal(SIGTERM, on_request);
  // Under nohup SIGHUP stays ignored.
  if (std::signal(SIGHUP, on_hangup) == SIG_IGN) std::signal(SIGHUP, SIG_IGN);
  return g_stop;
}

}  // namespace cohort::apps
