// The CUDA runtime as the rest of the project sees it: checked calls, streams, events, uploads.
// Only `.cu` and `*_cuda.cpp` files, which a CPU build leaves out, may include it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "core/check.h"
#include "core/device.h"

namespace cohort::cuda {

// A failed CUDA call or kernel. After a fatal one the device's memory cannot be read any more: the
// process must end, and goes on from its last checkpoint.
class CudaError : public Error {
 public:
  using Error::Error;
};

// Throws CudaError naming `what`; the runtime's own record of the error is cleared first, so that
// the next call does not report it again.
[[noreturn]] void throw_error(cudaError_t code, const char* what, const char* file, int line);

#define COHORT_CUDA_CHECK(call)                                              \
  do {                                                                       \
    if (const cudaError_t code_ = (call); code_ != cudaSuccess) [[unlikely]] \
      ::cohort::cuda::throw_error(code_, #call, __FILE__, __LINE__);         \
  } while (false)

inline constexpr int kMaxDevices = 64;
// Makes `device` the runtime's current one in this thread.
void activate(Device device);
// The stream for kernels on `device` in this thread, with the device made current.
cudaStream_t stream(Device device);

// Lets blocks of the kernel have all dynamic shared memory that the current device has for it.
// Throws Error naming `name` if that is less than `bytes`.
void allow_shared_memory(const char* name, const void* kernel, size_t bytes, Device device);
// Whether the code of the kernel that runs on `device` was compiled for sm_90 or newer, not for an
// older GPU and translated.
bool is_for_hopper(const void* kernel, Device device);
int multiprocessors(Device device);
// Whether the GPU is of the one kind that code for sm_90a runs on.
bool is_hopper(Device device);
void check_shared_memory(const char* name, size_t bytes, size_t most);

// A stream of its own, for work beside the device's main stream.
class OwnedStream {
 public:
  explicit OwnedStream(Device device);
  ~OwnedStream();
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;
  Stream get() const { return stream_; }

 private:
  Stream stream_;
};

// A point in a stream.
class Event {
 public:
  explicit Event(Device device);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(Stream stream);
  // Work enqueued on `stream` from now on starts after the recorded point.
  void wait(Stream stream) const;
  // Blocks until the device has passed the recorded point; returns at once if there is none.
  void synchronize() const;

 private:
  Device device_;
  cudaEvent_t event_ = nullptr;
};

// Copies host memory to the device, in the order of its current stream. The host's memory may be
// used again at once.
void upload(void* to, const void* from, size_t bytes, Device device);

}  // namespace cohort::cuda
