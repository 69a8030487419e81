// The CUDA runtime as the rest of the project sees it: checked calls, streams, events, pinned host
// memory. Only `.cu` and `*_cuda.cpp` files, which a CPU build leaves out, may include it.
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
  CudaError(const std::string& message, cudaError_t code) : Error(message), code_(code) {}
  cudaError_t code() const { return code_; }

 private:
  cudaError_t code_;
};

// Throws CudaError naming `what`; the runtime's own record of the error is cleared first, so that
// the next call does not report it again.
[[noreturn]] void throw_error(cudaError_t code, const char* what, const char* file, int line);

#define COHORT_CUDA_CHECK(call)                                              \
  do {                                                                       \
    if (const cudaError_t code_ = (call); code_ != cudaSuccess) [[unlikely]] \
      ::cohort::cuda::throw_error(code_, #call, __FILE__, __LINE__);         \
  } while (false)

// Devices that can be used; 0 where there is no driver.
int device_count();
const cudaDeviceProp& properties(Device device);

// Makes `device` the runtime's current one in this thread.
void activate(Device device);
// The stream for kernels on `device` in this thread, with the device made current.
cudaStream_t stream(Device device);

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

// A point in a stream. `Timing::kOn` events can be subtracted.
enum class Timing { kOff, kOn };
class Event {
 public:
  explicit Event(Device device, Timing timing = Timing::kOff);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(Stream stream);
  // Work enqueued on `stream` from now on starts after the recorded point.
  void wait(Stream stream) const;
  void synchronize() const;
  // True once the device has passed the recorded point.
  bool done() const;
  // Milliseconds from `start` to this event; both must be done.
  float since(const Event& start) const;

 private:
  Device device_;
  cudaEvent_t event_ = nullptr;
};

// Page-locked host memory from a cache: the source or target of copies that run beside the host.
// The owner sees to it that no copy is under way when the buffer goes.
class PinnedBuffer {
 public:
  explicit PinnedBuffer(size_t bytes);
  ~PinnedBuffer();
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;
  void* data() const { return pointer_; }
  size_t size() const { return bytes_; }

 private:
  size_t bytes_;
  void* pointer_;
};

}  // namespace cohort::cuda
