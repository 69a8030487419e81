// Counting the memory that work on tensors would take, without the memory and without the work.
#pragma once

#include <memory>

#include "core/allocator.h"

namespace cohort {

// While it lives, this thread's new tensors have shapes and no elements (reading one is an Error),
// and its kernels, copies and fills check their arguments and do nothing. What was made meanwhile
// must be gone before it.
class DryRun {
 public:
  // Tensors count as on `device`, with its allocator's sizes; it need not be in this machine.
  explicit DryRun(Device device);
  ~DryRun();
  DryRun(const DryRun&) = delete;
  DryRun& operator=(const DryRun&) = delete;

  // Of this run alone. Its peak is since the construction.
  AllocatorStats stats() const { return memory_->stats(); }

 private:
  const std::unique_ptr<Allocator> memory_;
  Allocator* const outer_;
};

}  // namespace cohort
