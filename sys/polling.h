// Waiting for descriptors with a deadline, and reading what they have.
#pragma once

#include <poll.h>
#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

#include "sys/descriptor.h"

namespace cohort {

using Clock = std::chrono::steady_clock;

// Waits until a descriptor has an event that it is polled for, or until the deadline; returns
// whether one has. Negative descriptors are skipped. Signals do not end the wait.
bool poll_until(Clock::time_point deadline, std::vector<pollfd> fds);

// Maximum bytes that one call of read_available() reads.
inline constexpr ssize_t kMaxRead = 1 << 16;
// Appends bytes of a non-blocking descriptor. Returns how many; 0 if there are none yet, and -1 at
// the end of the data or on failure.
ssize_t read_available(int fd, std::string& out);

// Ends the poll_until() of another thread.
class WakeEvent {
 public:
  // Throws Error.
  WakeEvent();
  int fd() const { return event_.get(); }  // readable from signal() until clear()
  void signal() const;
  void clear() const;

 private:
  Descriptor event_;
};

}  // namespace cohort
