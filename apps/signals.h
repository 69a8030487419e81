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

// From now on a signal sets the result to true, and the third SIGINT or SIGTERM ends the process.
// The first one prints how the run stops, and the second a notice to wait. While run_progress() is
// kNothingToSave, SIGINT, SIGTERM and SIGHUP end the process at once, unless it is a launcher,
// which forwards them.
const std::atomic<bool>& stop_on_signals(SignalVerbosity verbosity);

}  // namespace cohort::apps
