// Memory of one device: a caching allocator with statistics. Freed blocks are kept for the next
// request, so that a training step in its steady state asks the system for nothing.
//
// On CUDA memory is ordered by streams: a block belongs to the stream that was current when it was
// allocated, and serves that stream's next request at once, also while the work that used it is
// still queued. So a tensor that another stream uses must live until its own stream has been made
// to wait for that use. With COHORT_CUDA_CACHE=0 in the environment every request goes to the
// driver, and compute-sanitizer sees each tensor's bounds.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/check.h"
#include "core/device.h"

namespace cohort {

// There is no memory for a request. The message says what is held.
class OutOfMemoryError : public Error {
 public:
  using Error::Error;
};

// Bytes are those that served the request: on the CPU its size class (at most 12.5 % above the
// request), on CUDA the request rounded up to 512.
struct AllocatorStats {
  int64_t live_bytes = 0;      // handed out now
  int64_t peak_bytes = 0;      // highest live_bytes since the last reset_peak()
  int64_t reserved_bytes = 0;  // taken from the system: live and cached
  int64_t allocations = 0;     // requests so far
};

// Bytes that the device has left for this process: what is free there, and what allocator(device)
// keeps for later requests.
int64_t available_memory(Device device);

// Bytes that a request for `bytes` takes.
size_t allocation_size(size_t bytes, Device device = {});

class Allocator {
 public:
  virtual ~Allocator() = default;
  // At least `bytes` bytes aligned to 64 (CUDA: 512). Throws OutOfMemoryError when the system has
  // no more.
  virtual void* allocate(size_t bytes) = 0;
  // `bytes` must be what allocate() was given.
  virtual void deallocate(void* pointer, size_t bytes) noexcept = 0;
  // Lets other requests use the memory of a live `pointer`, whose contents are lost, until
  // take_back(). That is false while one of them is still live; then `pointer` stays lent, and all
  // that can be done with it is to try again or deallocate() it. Memory is lent on CUDA, where it
  // is cached and more than 1 MiB; elsewhere these do nothing.
  virtual void lend(void* /*pointer*/) {}
  virtual bool take_back(void* /*pointer*/) { return true; }
  virtual AllocatorStats stats() const = 0;
  virtual void reset_peak() = 0;
  // Returns cached blocks to the system, except those of a MemoryPool.
  virtual void release_cached() = 0;
};

// The process-wide allocator of `device`; safe to use from several threads. In a dry run
// (core/dry_run.h) the one that counts.
Allocator& allocator(Device device);
// Whether this thread is in one: then tensors have no elements.
bool is_dry_run();

// Page-locked host memory, for copies to and from a GPU that run beside the host (CUDA builds). It
// is not ordered by streams: free a block when the copies that use it are over.
Allocator& pinned_allocator();

// Device memory set apart: while a Use lives, this thread's allocations on `device` come from the
// pool, and what it frees goes back to the pool, never to others. For a captured CUDA graph, whose
// replays write to the addresses of its capture. Memory returns to the device when the pool and all
// that was allocated from it are gone.
class MemoryPool {
 public:
  explicit MemoryPool(Device device);
  ~MemoryPool();
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  // Of what was allocated from it and is not freed yet.
  int64_t live_bytes() const;

  class Use {
   public:
    explicit Use(const MemoryPool& pool);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    uint64_t previous_;
  };

 private:
  Device device_;
  uint64_t id_;
};

}  // namespace cohort
