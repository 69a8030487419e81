// Memory of one device: a caching allocator with statistics. Freed blocks are kept for the next
// request, so that a training step in its steady state makes no requests to the system.
//
// On CUDA memory is stream-ordered: a block belongs to the stream that was current when it was
// allocated, and is reused by that stream's next request immediately, even while the work that used
// it is still queued. A tensor used on another stream must therefore live until its own stream
// waits for that use. With COHORT_CUDA_CACHE=0 in the environment every request goes to the driver,
// so that compute-sanitizer sees each tensor's bounds.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "core/check.h"
#include "core/device.h"
#include "core/non_copyable.h"

namespace cohort {

// A request could not be served. The message states how much memory is in use.
class OutOfMemoryError : public Error {
 public:
  using Error::Error;
};

// Bytes count allocated blocks: on the CPU the size class of a request (at most 12.5 % above the
// request), on CUDA the request rounded up to 512.
struct AllocatorStats {
  int64_t live_bytes = 0;      // currently allocated
  int64_t peak_bytes = 0;      // highest live_bytes since the last reset_peak()
  int64_t reserved_bytes = 0;  // obtained from the system: live and cached
  int64_t allocations = 0;     // number of requests
};

// Bytes available to this process on the device: its free memory plus the blocks cached by
// allocator(device).
int64_t available_memory(Device device);
// Bytes of the device's memory, in use or not.
int64_t total_memory(Device device);

// Size of the block that serves a request for `bytes`.
size_t allocation_size(size_t bytes, Device device = {});

class Allocator {
 public:
  virtual ~Allocator() = default;
  // Returns at least `bytes` bytes aligned to 64 (CUDA: 512). Throws OutOfMemoryError when memory
  // is exhausted.
  virtual void* allocate(size_t bytes) = 0;
  // `bytes` must equal the argument of allocate().
  virtual void deallocate(void* pointer, size_t bytes) noexcept = 0;
  // Makes the memory of a live `pointer` available to other requests until reclaim(); its contents
  // are lost. reclaim() returns false while such a request is still live; the memory then stays
  // released, and the only valid calls are another reclaim() and deallocate(). Has an effect on
  // CUDA only, for cached blocks above 1 MiB.
  virtual void release_to_pool(void* /*pointer*/) {}
  virtual bool reclaim(void* /*pointer*/) { return true; }
  // Returns cached blocks to the system, except those of a MemoryPool.
  virtual void release_cached() = 0;
  // On CUDA replaces the free segments of the current stream by a single one that holds the most
  // that has been live at a time, if they have become much larger than that together: work whose
  // tensors have other sizes each time keeps making segments. To be called between such work.
  virtual void join_segments() {}

  AllocatorStats stats() const {
    std::lock_guard lock(mutex_);
    return stats_;
  }
  void reset_peak() {
    std::lock_guard lock(mutex_);
    stats_.peak_bytes = stats_.live_bytes;
  }

 protected:
  // Throws OutOfMemoryError if an AllocationFaults lets this request fail.
  static void check_faults(Device device);
  // Adds to the live bytes; `mutex_` must be held.
  void count_live(size_t bytes) {
    stats_.live_bytes += static_cast<int64_t>(bytes);
    stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.live_bytes);
  }

  mutable std::mutex mutex_;
  AllocatorStats stats_;
};

// The process-wide allocator of `device`; thread-safe. In a dry run (core/dry_run.h) it is the
// counting allocator.
Allocator& allocator(Device device);
// True if this thread is in a dry run: its tensors have no elements.
bool is_dry_run();

// Page-locked host memory for asynchronous copies to and from a GPU (CUDA builds). It is not
// stream-ordered: free a block only after the copies that use it have completed. Blocks above
// kLargePinned bytes have no size classes, are zeros, and return to the system when they are freed.
inline constexpr size_t kLargePinned = size_t{1} << 20;
Allocator& pinned_allocator();

// Lets requests for memory of a kind of device fail while it lives, for tests: request number
// `first`, counted from 0 at construction, and the `count` - 1 that follow it, in all threads. One
// may exist at a time.
class AllocationFaults : NonCopyable {
 public:
  AllocationFaults(Device device, int64_t first, int64_t count = 1);
  ~AllocationFaults();
  // Number of requests since construction.
  int64_t requests() const;
};

// A private pool of device memory: work on stream() allocates from it, and blocks freed return to
// the pool alone. For a captured CUDA graph, whose replays write to the addresses of its capture.
// The memory returns to the device once the pool and all its allocations are destroyed.
class MemoryPool : NonCopyable {
 public:
  explicit MemoryPool(Device device);
  ~MemoryPool();

  // The device's current stream, with the memory of this pool.
  Stream stream() const;
  // Bytes currently allocated from the pool.
  int64_t live_bytes() const;

 private:
  Device device_;
  uint64_t id_;
};

}  // namespace cohort
