// Measures the memory that work on tensors would need, without allocating it or doing the work.
#pragma once

#include <memory>

#include "core/allocator.h"
#include "core/non_copyable.h"

namespace cohort {

// While it lives, this thread's new tensors have shapes but no elements (reading one throws Error),
// and its kernels, copies and fills only check their arguments. Tensors created meanwhile must be
// destroyed before it.
class DryRun : NonCopyable {
 public:
  // Counts tensors with the allocation sizes of `device`, which this machine need not have.
  explicit DryRun(Device device);
  ~DryRun();

  // Statistics of this run only; the peak is counted from construction.
  AllocatorStats stats() const { return memory_->stats(); }
  // Statistics of page-locked host memory (Tensor::pinned()), which stats() does not count.
  AllocatorStats pinned_stats() const { return pinned_->stats(); }

 private:
  friend Allocator& allocator(Device device);
  friend Allocator& pinned_allocator();
  const std::unique_ptr<Allocator> memory_, pinned_;
  DryRun* const outer_;
};

}  // namespace cohort
