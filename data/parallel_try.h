// parallel_for() over work that may throw.
#pragma once

#include <cstdint>
#include <exception>
#include <mutex>

#include "core/parallel.h"
#include "core/progress.h"

namespace cohort {

// Calls fn(i) for every i in [0, n), by all threads in blocks of `grain`. Throws what fn(i) has
// thrown for the smallest such i, independent of the thread schedule.
template <class F>
void parallel_try(int64_t n, int64_t grain, F&& fn) {
  std::mutex mutex;
  int64_t first = n;
  std::exception_ptr error;
  parallel_for(n, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) try {
        fn(i);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (i > first) continue;
        first = i;
        error = std::current_exception();
      }
    note_progress();
  });
  if (error != nullptr) std::rethrow_exception(error);
}

}  // namespace cohort
