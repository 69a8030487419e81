// Devices, streams, events and errors of the CUDA runtime.
#include <array>
#include <mutex>

#include "core/cuda.h"

namespace cohort::cuda {
namespace {

// After one of these the device's context is lost.
bool is_fatal(cudaError_t code) {
  switch (code) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorHardwareStackError:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorContained:
      return true;
    default:
      return false;
  }
}

}  // namespace

void throw_error(cudaError_t code, const char* what, const char* file, int line) {
  cudaGetLastError();
  std::string text =
      str("[cuda] ", what, ": ", cudaGetErrorString(code), " (", cudaGetErrorName(code), ")");
  if (is_fatal(code))
    text +=
        "; the device's memory is lost and nothing more is written from it; hint: resume from the "
        "last checkpoint, and look for the cause with compute-sanitizer";
  throw CudaError(with_place(text, file, line));
}

int device_count() {
  static const int count = [] {
    int n = 0;
    if (cudaGetDeviceCount(&n) != cudaSuccess) {
      cudaGetLastError();
      return 0;
    }
    return std::min(n, kMaxDevices);
  }();
  return count;
}

void activate(Device device) {
  thread_local int active = -1;
  if (active == device.index) return;
  COHORT_CUDA_CHECK(cudaSetDevice(device.index));
  active = device.index;
}

Stream default_stream(Device device) {
  static std::array<cudaStream_t, kMaxDevices> streams{};
  static std::array<std::once_flag, kMaxDevices> known;
  const auto i = static_cast<size_t>(device.index);
  std::call_once(known[i], [&] {
    activate(device);
    COHORT_CUDA_CHECK(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
  });
  return {device, streams[i]};
}

cudaStream_t stream(Device device) {
  activate(device);
  return static_cast<cudaStream_t>(current_stream(device).handle);
}

void synchronize(Stream stream) {
  activate(stream.device);
  COHORT_CUDA_CHECK(cudaStreamSynchronize(static_cast<cudaStream_t>(stream.handle)));
}

OwnedStream::OwnedStream(Device device) : stream_{device, nullptr} {
  activate(device);
  cudaStream_t handle = nullptr;
  COHORT_CUDA_CHECK(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking));
  stream_.handle = handle;
}
OwnedStream::~OwnedStream() {
  // The allocator knows streams by their handles, and the next stream may be given this one.
  cudaStreamSynchronize(static_cast<cudaStream_t>(stream_.handle));
  cudaStreamDestroy(static_cast<cudaStream_t>(stream_.handle));
}

Event::Event(Device device) : device_(device) {
  activate(device);
  COHORT_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
}
Event::~Event() {
  cudaEventDestroy(event_);
}
void Event::record(Stream stream) {
  activate(device_);
  COHORT_CUDA_CHECK(cudaEventRecord(event_, static_cast<cudaStream_t>(stream.handle)));
}
void Event::wait(Stream stream) const {
  activate(device_);
  COHORT_CUDA_CHECK(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream.handle), event_, 0));
}
void Event::synchronize() const {
  COHORT_CUDA_CHECK(cudaEventSynchronize(event_));
}

}  // namespace cohort::cuda
