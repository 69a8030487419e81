// Wrappers of the CUDA runtime: checked calls, streams, events, uploads. Only `.cu` and
// `*_cuda.cpp` files, which a CPU build excludes, may include it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "core/check.h"
#include "core/device.h"
#include "core/gpu.h"
#include "core/non_copyable.h"

namespace cohort::cuda {

// A failed CUDA call or kernel. After a fatal error the device's memory is inaccessible: the
// process must exit and resume from its last checkpoint.
class CudaError : public Error {
 public:
  using Error::Error;
};

// Throws OutOfMemoryError for cudaErrorMemoryAllocation, else CudaError, naming `call`. Clears the
// runtime's last error first, so that the next call does not report it again.
[[noreturn]] void throw_error(cudaError_t code, const char* call, const char* file, int line);

#define COHORT_CUDA_CHECK(call)                                              \
  do {                                                                       \
    if (const cudaError_t code_ = (call); code_ != cudaSuccess) [[unlikely]] \
      ::cohort::cuda::throw_error(code_, #call, __FILE__, __LINE__);         \
  } while (false)

// Clears the runtime's last error, and returns the cached blocks of allocator() on the current
// device to the driver.
void release_cached_blocks();
// The code of a call that may need memory, such as a kernel's first launch, which loads its code.
// If there is too little, release_cached_blocks() precedes a second call.
template <class Call>
cudaError_t with_memory(const Call& call) {
  const cudaError_t code = call();
  if (code != cudaErrorMemoryAllocation) [[likely]]
    return code;
  release_cached_blocks();
  return call();
}

inline constexpr int kMaxDevices = 64;
// Makes `device` the current device of this thread.
void activate(Device device);
// Current stream of `device` in this thread. Also makes the device current.
cudaStream_t stream(Device device);

// Properties of a device, as the driver reports them. Two environment variables limit them for
// tests: COHORT_COMPUTE_CAPABILITY ("8.6") compute capability and shared memory to those of an
// older GPU, and COHORT_MULTIPROCESSORS ("4") the multiprocessors, so that a block of a persistent
// kernel processes several tiles.
const GpuProperties& gpu_properties(Device device);
// Limits gpu_properties(device) while it lives. For tests.
class GpuLimit : NonCopyable {
 public:
  struct Limits {
    int compute_capability = 0, multiprocessors = 0;  // 0: no limit
  };
  GpuLimit(Device device, const Limits& limits);
  ~GpuLimit();

 private:
  const Device device_;
  const GpuProperties before_;
};

// True if `device` fits a kernel with `needs`, without its static shared memory, and its code there
// was compiled for that compute capability, rather than translated from PTX for an older one.
bool fits(const void* kernel, const KernelNeeds& needs, Device device);
// Number of clusters of `blocks` blocks that the device can run at a time, as its multiprocessors
// are grouped, and in proportion if these are limited; 0: none fits, as on one multiprocessor.
int active_clusters(const void* kernel, int blocks, int block_threads, size_t shared_bytes,
                    Device device);
// Number of blocks that the device can run at a time, whatever limits gpu_properties().
int64_t resident_blocks(const void* kernel, int block_threads, size_t shared_bytes, Device device);
// Raises the kernel's limit of dynamic shared memory to the maximum of the device. Throws Error
// naming `name` if that is less than `bytes`.
void allow_shared_memory(const char* name, const void* kernel, size_t bytes, Device device);
void check_shared_memory(const char* name, int64_t bytes, int64_t limit);

// When dependent grids of a kernel with Start::kProgrammatic may start (launch.cuh).
enum class Trigger {
  kEarly,  // perhaps while grids before this one are running
  kLate    // when these have completed: the kernel waits for them before it triggers
};
// Records the trigger of the last work on a stream: kLate but for programmatic launches.
void record_trigger(cudaStream_t stream, Trigger trigger);
Trigger last_trigger(cudaStream_t stream);

// Owns a stream, for work concurrent with the device's main stream.
class OwnedStream : NonCopyable {
 public:
  enum class Priority { kDefault, kHighest };
  explicit OwnedStream(Device device, Priority priority = Priority::kDefault);
  ~OwnedStream();
  Stream get() const { return stream_; }

 private:
  Stream stream_;
};

// A point in a stream.
class Event : NonCopyable {
 public:
  explicit Event(Device device);
  ~Event() { cudaEventDestroy(event_); }
  void record(Stream stream);
  // Makes later work on `stream` wait for the recorded point.
  void wait(Stream stream) const;
  // Blocks until the device has reached the recorded point; returns immediately if none is
  // recorded.
  void synchronize() const { COHORT_CUDA_CHECK(cudaEventSynchronize(event_)); }
  // True once the device has reached the recorded point, or has failed.
  bool is_reached() const { return cudaEventQuery(event_) != cudaErrorNotReady; }

 private:
  Device device_;
  cudaEvent_t event_ = nullptr;
};

// Copies host memory to the device in stream order. The host memory may be reused immediately.
void upload(void* to, const void* from, size_t bytes, Device device);

}  // namespace cohort::cuda
