#include "core/trace.h"

#include <chrono>
#include <utility>

#include "core/cuda_backend.h"
#include "core/progress.h"
#include "core/with_cuda.h"

namespace cohort {
namespace {

thread_local Trace* t_trace = nullptr;

}  // namespace

Trace::Trace(Device device) : device_(device) {
  COHORT_CHECK(t_trace == nullptr, "[trace] this thread is being traced");
  synchronize(device);
  on_device<[] {}, cuda::start_kernel_trace>(device);
  t_trace = this;
}

Trace::~Trace() {
  if (t_trace != this) return;
  try {
    finish();
  } catch (const std::exception&) {
    t_trace = nullptr;  // the traced work has failed and reports its own error
  }
}

std::vector<TraceEvent> Trace::finish() {
  COHORT_CHECK(t_trace == this && open_ < 0, "[trace] expected to end once, and outside of ops");
  synchronize(device_);
  t_trace = nullptr;
  const std::vector<TraceEvent> kernels =
      on_device<[] { return std::vector<TraceEvent>(); }, cuda::finish_kernel_trace>(device_);
  events_.insert(events_.end(), kernels.begin(), kernels.end());
  return std::move(events_);
}

int64_t trace_clock() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void trace_phase(const char* name, int64_t begin, int64_t end) {
  if (t_trace == nullptr) return;
  t_trace->events_.push_back(
      {.kind = TraceEvent::Kind::kPhase, .name = name, .begin = begin, .end = end});
}

OpSpan::OpSpan(std::string_view name) : trace_(t_trace) {
  note_progress();
  if (trace_ == nullptr) return;
  index_ = static_cast<int64_t>(trace_->events_.size());
  trace_->events_.push_back({.name = std::string(name),
                             .begin = trace_clock(),
                             .op = std::exchange(trace_->open_, index_)});
  if constexpr (kWithCuda)
    if (trace_->device_.is_cuda()) cuda::enter_op(index_);
}

OpSpan::~OpSpan() {
  if (trace_ == nullptr) return;
  if constexpr (kWithCuda)
    if (trace_->device_.is_cuda()) cuda::leave_op();
  TraceEvent& event = trace_->events_[static_cast<size_t>(index_)];
  event.end = trace_clock();
  trace_->open_ = event.op;
}

}  // namespace cohort
