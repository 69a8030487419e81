// Signal handling of commands.
#pragma once

#include <atomic>

namespace cohort::apps {

// For commands with nothing to save: SIGINT and SIGTERM end the process at once, with exit code 130
// for a shell. SIGPIPE and SIGXFSZ are ignored, so that a closed pipe and a file at its size limit
// are write errors.
void set_signals();

// From now on SIGINT sets the result to true, or ends the process if it is already true. The caller
// resets it to false after handling it.
std::atomic<bool>& interrupt_request();

// Messages of this process about signals: all, only the notice to wait (of a launcher, whose ranks
// print the others), or none (of a rank other than 0).
enum class SignalVerbosity { kAll, kWaitNotice, kNone };

// From now on the first SIGINT or SIGTERM sets the result to true and prints that the run is being
// saved, the second prints a notice to wait, and the third ends the process. SIGHUP only sets the
// result to true.
const std::atomic<bool>& stop_on_signals(SignalVerbosity verbosity);

}  // namespace cohort::apps
