// Progress of this process, by which a watchdog tells slow work from a hang. Its threads count
// together. Lock-free.
#pragma once

#include <atomic>
#include <cstdint>

namespace cohort {

struct Progress {
  uint64_t count = 0;         // pieces of work done
  const char* activity = "";  // what the process does now: "saving a checkpoint"
};

namespace detail {
inline std::atomic<uint64_t> progress_count{0};
inline std::atomic<const char*> progress_activity{"starting"};
static_assert(std::atomic<uint64_t>::is_always_lock_free);
}  // namespace detail

// Reports a piece of work: an op, a decode step, the answer of a reward, bytes of a file.
inline void note_progress() {
  detail::progress_count.fetch_add(1, std::memory_order_relaxed);
}

// Reports what the process does from now on; `activity` is a string literal.
inline void begin_activity(const char* activity) {
  detail::progress_activity.store(activity, std::memory_order_relaxed);
  note_progress();
}

inline Progress progress() {
  return {detail::progress_count.load(std::memory_order_relaxed),
          detail::progress_activity.load(std::memory_order_relaxed)};
}

}  // namespace cohort
