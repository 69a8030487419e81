#include "sys/polling.h"

#include <sys/eventfd.h>

#include <algorithm>
#include <climits>
#include <cstdint>

namespace cohort {

bool poll_until(Clock::time_point deadline, std::vector<pollfd> fds) {
  int ready = -1;
  do {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    ready = ::poll(fds.data(), fds.size(), static_cast<int>(std::clamp<int64_t>(left, 0, INT_MAX)));
  } while (ready < 0 && errno == EINTR);
  return ready > 0;
}

ssize_t read_available(int fd, std::string& out) {
  const size_t before = out.size();
  out.resize(before + kMaxRead);
  const ssize_t n = TEMP_FAILURE_RETRY(::read(fd, out.data() + before, kMaxRead));
  out.resize(before + static_cast<size_t>(std::max<ssize_t>(n, 0)));
  if (n > 0) return n;
  return n < 0 && errno == EAGAIN ? 0 : -1;
}

WakeEvent::WakeEvent() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!event_.is_open()) throw_errno("cannot create an event descriptor");
}

void WakeEvent::signal() const {
  const uint64_t increment = 1;
  [[maybe_unused]] const ssize_t n = ::write(fd(), &increment, sizeof increment);
}

void WakeEvent::clear() const {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t n = ::read(fd(), &count, sizeof count);
}

}  // namespace cohort
