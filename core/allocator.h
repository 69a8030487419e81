// Memory of one device: a caching allocator with statistics. Freed blocks are kept by size class
// for the next request, so that a training step in its steady state asks the system for nothing.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/device.h"

namespace cohort {

// Bytes are those of the size class that served the request (at most 12.5 % above the request).
struct AllocatorStats {
  int64_t live_bytes = 0;      // handed out now
  int64_t peak_bytes = 0;      // highest live_bytes since the last reset_peak()
  int64_t reserved_bytes = 0;  // taken from the system: live and cached
  int64_t allocations = 0;     // requests so far
};

// Bytes that a request for `bytes` takes: its size class.
size_t allocation_size(size_t bytes);

class Allocator {
 public:
  virtual ~Allocator() = default;
  // At least `bytes` bytes aligned to 64. Throws Error with the statistics when the system has no
  // more.
  virtual void* allocate(size_t bytes) = 0;
  // `bytes` must be what allocate() was given. Never throws.
  virtual void deallocate(void* pointer, size_t bytes) noexcept = 0;
  virtual AllocatorStats stats() const = 0;
  virtual void reset_peak() = 0;
  // Returns cached blocks to the system.
  virtual void release_cached() = 0;
};

// The process-wide allocator of `device`; safe to use from several threads.
Allocator& allocator(Device device);

}  // namespace cohort
