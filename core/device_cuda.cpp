// Devices, streams, events and errors of the CUDA runtime.
#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <utility>

#include "core/cuda.h"
#include "core/cuda_backend.h"

namespace cohort::cuda {
namespace {

// True for errors that destroy the device's context.
bool is_fatal(cudaError_t code) {
  constexpr cudaError_t kFatal[] = {
      cudaErrorIllegalAddress,     cudaErrorLaunchFailure,      cudaErrorLaunchTimeout,
      cudaErrorIllegalInstruction, cudaErrorMisalignedAddress,  cudaErrorInvalidAddressSpace,
      cudaErrorInvalidPc,          cudaErrorHardwareStackError, cudaErrorAssert,
      cudaErrorECCUncorrectable,   cudaErrorContained};
  return std::find(std::begin(kFatal), std::end(kFatal), code) != std::end(kFatal);
}

constexpr int kMinMajor = 8;  // compute capability 8.0: bf16 tensor cores, cp.async

struct Devices {
  int count = 0;
  std::string no_device_reason = "no device";
};

Devices find_devices() {
  Devices out;
  int n = 0;
  if (const cudaError_t code = cudaGetDeviceCount(&n); code != cudaSuccess) {
    cudaGetLastError();
    out.no_device_reason = cudaGetErrorString(code);
    return out;
  }
  for (; out.count < std::min(n, kMaxDevices); ++out.count) {
    cudaDeviceProp p;
    COHORT_CUDA_CHECK(cudaGetDeviceProperties(&p, out.count));
    if (p.major >= kMinMajor) continue;
    out.no_device_reason = str("cuda:", out.count, ", ", p.name, ", has compute capability ",
                               p.major, ".", p.minor, ", expected ", kMinMajor, ".0 or higher");
    break;
  }
  return out;
}

const Devices& devices() {
  static const Devices found = find_devices();
  return found;
}

int attribute(cudaDeviceAttr which, Device device) {
  int value = 0;
  COHORT_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device.index));
  return value;
}

}  // namespace

void throw_error(cudaError_t code, const char* call, const char* file, int line) {
  cudaGetLastError();
  std::string text =
      str("[cuda] ", call, ": ", cudaGetErrorString(code), " (", cudaGetErrorName(code), ")");
  if (is_fatal(code))
    text +=
        "; the device's memory is lost and nothing more is written from it; hint: resume from the "
        "last checkpoint, and find the cause with compute-sanitizer";
  throw CudaError(with_location(text, file, line));
}

int device_count() {
  return devices().count;
}
std::string no_device_reason() {
  return devices().no_device_reason;
}

double memory_bandwidth(Device device) {
  const int kilohertz = attribute(cudaDevAttrMemoryClockRate, device),
            bits = attribute(cudaDevAttrGlobalMemoryBusWidth, device);
  return 2e3 * kilohertz * bits / 8;  // two transfers per cycle
}

void activate(Device device) {
  int current = -1;
  COHORT_CUDA_CHECK(cudaGetDevice(&current));  // other code of the process may have changed it
  if (current != device.index) COHORT_CUDA_CHECK(cudaSetDevice(device.index));
}

void allow_shared_memory(const char* name, const void* kernel, size_t bytes, Device device) {
  // Set once to the maximum: changing limits would race with concurrent launches.
  static std::map<std::pair<const void*, int>, size_t> limits;
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  auto [it, is_new] = limits.try_emplace({kernel, device.index}, 0);
  if (is_new) {
    const int limit = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    cudaFuncAttributes attributes;
    COHORT_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
    it->second = static_cast<size_t>(limit) - attributes.sharedSizeBytes;
    COHORT_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(it->second)));
  }
  check_shared_memory(name, bytes, it->second);
}

bool is_compiled_for_sm90(const void* kernel, Device device) {
  static std::map<std::pair<const void*, int>, bool> cache;
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  auto [it, is_new] = cache.try_emplace({kernel, device.index}, false);
  if (is_new) {
    activate(device);
    cudaFuncAttributes attributes;
    COHORT_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
    it->second = attributes.ptxVersion >= 90;
  }
  return it->second;
}

int multiprocessors(Device device) {
  return attribute(cudaDevAttrMultiProcessorCount, device);
}

bool is_hopper(Device device) {
  return attribute(cudaDevAttrComputeCapabilityMajor, device) == 9 &&
         attribute(cudaDevAttrComputeCapabilityMinor, device) == 0;
}

void check_shared_memory(const char* name, size_t bytes, size_t limit) {
  COHORT_CHECK(bytes <= limit, "[", name, "] needs ", bytes >> 10,
               " KiB of shared memory per block, this GPU has ", limit >> 10);
}

Stream default_stream(Device device) {
  static std::array<cudaStream_t, kMaxDevices> streams{};
  static std::array<std::once_flag, kMaxDevices> initialised;
  const auto i = static_cast<size_t>(device.index);
  std::call_once(initialised[i], [&] {
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
  // The allocator identifies streams by handle, and a new stream may get this handle.
  cudaStreamSynchronize(static_cast<cudaStream_t>(stream_.handle));
  cudaStreamDestroy(static_cast<cudaStream_t>(stream_.handle));
}

Event::Event(Device device) : device_(device) {
  activate(device);
  COHORT_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
}
void Event::record(Stream stream) {
  activate(device_);
  COHORT_CUDA_CHECK(cudaEventRecord(event_, static_cast<cudaStream_t>(stream.handle)));
}
void Event::wait(Stream stream) const {
  activate(device_);
  COHORT_CUDA_CHECK(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream.handle), event_, 0));
}

}  // namespace cohort::cuda
