// An owned file descriptor (file, socket or pipe), closed on destruction, and the system's reason
// of a failed call.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "core/check.h"

namespace cohort {

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() { close(); }
  int get() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  // Returns false and sets errno on failure: some file systems report a failed write only here.
  bool close() { return fd_ < 0 || ::close(std::exchange(fd_, -1)) == 0; }

 private:
  int fd_;
};

// The system's text for an errno value.
inline std::string system_reason(int error = errno) {
  return std::strerror(error);
}

// Throws E("WHAT: REASON") with the reason of the call that has just failed.
template <class E = Error, class... Args>
[[noreturn]] void throw_errno(const Args&... what) {
  const int error = errno;
  throw E(str(what..., ": ", system_reason(error)));
}

}  // namespace cohort
