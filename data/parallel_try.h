// parallel_for() over work that may throw.
#pragma once

#include <cstdint>
#include <exception>
#include <mutex>
#include <string>

#include "core/check.h"
#include "core/parallel.h"

namespace cohort {

// Calls fn(i) for every i in [0, n), by all threads in blocks of `grain`. Throws an InputError with
// the message of the smallest i whose fn(i) has thrown, independent of the thread schedule.
template <class F>
void parallel_try(int64_t n, int64_t grain, F&& fn) {
  std::mutex mutex;
  int64_t first = n;
  std::string message;
  parallel_for(n, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) try {
        fn(i);
      } catch (const std::exception& e) {
        const std::lock_guard lock(mutex);
        if (i > first) continue;
        first = i;
        message = e.what();
      }
  });
  if (first < n) throw InputError(message);
}

}  // namespace cohort
