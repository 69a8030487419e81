// What signals do to a command.
#pragma once

#include <atomic>

namespace cohort::apps {

// For commands with nothing to save: SIGINT and SIGTERM end them at once, 130 to a shell. A pipe
// whose reader has gone and a file at its size limit are errors of the write, not the end of the
// process (SIGPIPE, SIGXFSZ).
void set_signals();

// From now on SIGINT makes the result true, and ends the process where it is true already. Whoever
// has seen it sets it to false again.
std::atomic<bool>& interrupt_request();

// What this process says of signals: all, only that patience is needed (the ranks that it has
// started say the rest), or nothing (another rank speaks).
enum class SignalVoice { kAll, kPatience, kNone };

// From now on the first SIGINT or SIGTERM makes the result true and says that the run is being
// saved; the second asks for patience, the third ends the process. SIGHUP makes it true and no
// more.
const std::atomic<bool>& stop_on_signals(SignalVoice voice);

}  // namespace cohort::apps
