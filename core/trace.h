// Profile of a thread and of its GPU kernels: a list of events with begin and end times.
//
//   Trace trace(device);
//   ... work ...
//   for (const TraceEvent& event : trace.finish()) ...
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/device.h"
#include "core/non_copyable.h"

namespace cohort {

struct TraceEvent {
  // A phase of the program; a call of on_device() (core/with_cuda.h); GPU activity.
  enum class Kind { kPhase, kOp, kKernel, kCopy };
  Kind kind = Kind::kOp;
  std::string name;
  int64_t begin = 0, end = 0;  // nanoseconds of std::chrono::steady_clock
  // Index of the innermost enclosing op in the list of events; -1: none.
  int64_t op = -1;
  int64_t stream = 0;  // GPU stream id
};

// Records this thread during its lifetime; at most one per thread. Without one an op costs a
// branch.
class Trace : NonCopyable {
 public:
  // `device` is where the work runs; on a GPU, CUPTI records all work of this process. Throws
  // InputError with the reason if CUPTI is unavailable.
  explicit Trace(Device device);
  ~Trace();

  // Waits for the device and ends the recording. Returns ops in order of their begin with phases
  // inserted in order of their end, followed by kernels and copies.
  std::vector<TraceEvent> finish();

 private:
  friend class OpSpan;
  friend void trace_phase(const char*, int64_t, int64_t);
  const Device device_;
  std::vector<TraceEvent> events_;
  int64_t open_ = -1;  // the innermost op that has not ended
};

// Current time in nanoseconds, by the clock of all events.
int64_t trace_clock();
// Records a phase from `begin` to `end`; a no-op without a Trace.
void trace_phase(const char* name, int64_t begin, int64_t end);

// Records an op that lasts to the end of the scope, which also is progress (core/progress.h).
class OpSpan : NonCopyable {
 public:
  explicit OpSpan(std::string_view name);
  ~OpSpan();

 private:
  Trace* const trace_;
  int64_t index_ = -1;
};

// Name of a function without its namespaces, such as "adamw_step".
template <auto Function>
constexpr std::string_view function_name() {
  // "... [with auto Function = cohort::kernels::cpu::adamw_step; ...]", or with a pointer's "&" and
  // a "]" behind it.
  std::string_view name = __PRETTY_FUNCTION__;
  name.remove_prefix(name.find("Function = ") + 11);
  name = name.substr(0, name.find_first_of(";]"));
  return name.substr(name.rfind(':') + 1);
}

// Seconds between calls.
class Stopwatch {
 public:
  // Seconds since the last call, or since construction. Recorded as `phase`, if given, in a Trace.
  double lap(const char* phase = nullptr) {
    const int64_t begin = std::exchange(last_, trace_clock());
    if (phase != nullptr) trace_phase(phase, begin, last_);
    return 1e-9 * static_cast<double>(last_ - begin);
  }

 private:
  int64_t last_ = trace_clock();
};

}  // namespace cohort
