#include "apps/signals.h"

#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <string_view>

#include "apps/commands.h"

namespace cohort::apps {
namespace {

constexpr std::string_view kSaving =
    "cohort: saving at the end of this step; press Ctrl-C again twice to end at once\n";
constexpr std::string_view kPatience =
    "cohort: not done yet, please wait; press Ctrl-C once more to end without saving\n";
// On a terminal a message takes the place of the progress line.
constexpr std::string_view kClear = "\r\033[K";

std::atomic<bool> g_stop{false}, g_terminal{false};
std::atomic<int> g_requests{0};
std::atomic<SignalVoice> g_voice{SignalVoice::kNone};
static_assert(std::atomic<SignalVoice>::is_always_lock_free);

// Only what a signal handler may call.
void say(std::string_view text) {
  const int before = errno;
  // Where nobody listens there is nothing to be done.
  if (g_terminal && write(STDERR_FILENO, kClear.data(), kClear.size()) < 0) errno = before;
  if (write(STDERR_FILENO, text.data(), text.size()) < 0) errno = before;
}

extern "C" void end_interrupted(int) {
  _exit(kInterrupted);
}

extern "C" void on_interrupt(int) {
  if (g_stop.exchange(true)) _exit(kInterrupted);
}

extern "C" void on_hangup(int) {
  g_stop = true;
}

extern "C" void on_request(int signal) {
  g_stop = true;
  switch (g_requests.fetch_add(1)) {
    case 0:
      if (g_voice == SignalVoice::kAll) say(kSaving);
      return;
    case 1:
      if (g_voice != SignalVoice::kNone) say(kPatience);
      return;
    default:
      std::signal(signal, SIG_DFL);
      std::raise(signal);
  }
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

const std::atomic<bool>& stop_on_signals(SignalVoice voice) {
  g_voice = voice;
  g_terminal = isatty(STDERR_FILENO) == 1;
  std::signal(SIGINT, on_request);
  std::signal(SIGTERM, on_request);
  // nohup has it ignored.
  if (std::signal(SIGHUP, on_hangup) == SIG_IGN) std::signal(SIGHUP, SIG_IGN);
  return g_stop;
}

}  // namespace cohort::apps
