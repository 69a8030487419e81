// What goes wrong in parallel_for(), whose functions must not throw.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>

#include "core/check.h"

namespace cohort {

// Keeps the message that belongs to the smallest index, whichever thread comes first.
class FirstFault {
 public:
  void note(int64_t index, const char* what) {
    const std::lock_guard lock(mutex_);
    if (index_ >= 0 && index_ < index) return;
    index_ = index;
    what_ = what;
  }
  // Throws it as an InputError, if there is one.
  void check() const {
    if (index_ >= 0) throw InputError(what_);
  }

 private:
  std::mutex mutex_;
  int64_t index_ = -1;
  std::string what_;
};

}  // namespace cohort
