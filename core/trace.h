// What a thread spends its time on, and the kernels that it makes a GPU run: each with when it
// began and ended.
//
//   Trace trace(device);
//   ... work ...
//   for (const TraceEvent& event : trace.finish()) ...
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/device.h"

namespace cohort {

struct TraceEvent {
  // A part of the program; a call of on_device() (core/with_cuda.h); what the GPU did.
  enum class Kind { kPhase, kOp, kKernel, kCopy };
  Kind kind = Kind::kOp;
  std::string name;
  int64_t begin = 0, end = 0;  // nanoseconds of std::chrono::steady_clock
  // The innermost op around it, as an index of the list of events; -1: none.
  int64_t op = -1;
  int64_t stream = 0;  // of the GPU
};

// Records this thread while it lives; one at a time. Without one an op costs a test more.
class Trace {
 public:
  // `device`: of the work; that of a GPU is recorded by CUPTI, all of this process. Throws
  // InputError saying why if that is not to be had.
  explicit Trace(Device device);
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  // Waits for the device and ends the recording. Ops come in the order in which they began, phases
  // among them in that in which they ended; then kernels and copies.
  std::vector<TraceEvent> finish();

 private:
  friend class OpSpan;
  friend void trace_phase(const char*, int64_t, int64_t);
  const Device device_;
  std::vector<TraceEvent> events_;
  int64_t open_ = -1;  // the innermost op that has not ended
};

// Nanoseconds of the clock of all events.
int64_t trace_clock();
// Records that a phase took from `begin` to `end`; nothing without a Trace.
void trace_phase(const char* name, int64_t begin, int64_t end);

// An op from here to the end of the scope.
class OpSpan {
 public:
  explicit OpSpan(std::string_view name);
  ~OpSpan();
  OpSpan(const OpSpan&) = delete;
  OpSpan& operator=(const OpSpan&) = delete;

 private:
  Trace* const trace_;
  int64_t index_ = -1;
};

// The name of a function without its namespaces, such as "adamw_step".
template <auto Function>
constexpr std::string_view function_name() {
  // "... [with auto Function = cohort::kernels::cpu::adamw_step; ...]", or with a pointer's "&" and
  // a "]" behind it.
  std::string_view name = __PRETTY_FUNCTION__;
  name.remove_prefix(name.find("Function = ") + 11);
  name = name.substr(0, name.find_first_of(";]"));
  return name.substr(name.rfind(':') + 1);
}

}  // namespace cohort
