// Devices, streams, events and errors of the CUDA runtime.
#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "core/allocator.h"
#include "core/cuda.h"
#include "core/cuda_backend.h"
#include "core/sizes.h"

namespace cohort::cuda {
namespace {

// True for errors that destroy the device's context.
bool is_fatal(cudaError_t code) {
  constexpr cudaError_t kFatal[] = {cudaErrorIllegalAddress,
                                    cudaErrorLaunchFailure,
                                    cudaErrorLaunchTimeout,
                                    cudaErrorIllegalInstruction,
                                    cudaErrorMisalignedAddress,
                                    cudaErrorInvalidAddressSpace,
                                    cudaErrorInvalidPc,
                                    cudaErrorHardwareStackError,
                                    cudaErrorAssert,
                                    cudaErrorECCUncorrectable,
                                    cudaErrorContained,
                                    cudaErrorNvlinkUncorrectable,
                                    cudaErrorTensorMemoryLeak,
                                    cudaErrorMpsClientTerminated,
                                    cudaErrorExternalDevice,
                                    cudaErrorUnknown};
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

void limit(GpuProperties& gpu, const GpuLimit::Limits& limits) {
  if (const int capability = limits.compute_capability; capability > 0) {
    gpu.compute_capability = std::min(gpu.compute_capability, capability);
    gpu.shared_memory = std::min(gpu.shared_memory, shared_memory_of(capability));
  }
  if (limits.multiprocessors > 0)
    gpu.multiprocessors = std::min(gpu.multiprocessors, limits.multiprocessors);
}

// "8.6" as 86.
int parse_compute_capability(const std::string& text) {
  const size_t point = text.find('.');
  const bool is_number = point != std::string::npos && point + 2 == text.size() && point < 4 &&
                         text.find_first_not_of(".0123456789") == std::string::npos;
  const int out = is_number ? 10 * std::atoi(text.c_str()) + (text.back() - '0') : 0;
  if (out < 10 * kMinMajor)
    throw InputError(str("COHORT_COMPUTE_CAPABILITY: expected a number from ", kMinMajor,
                         ".0 on, such as 8.6, got '", text, "'"));
  return out;
}

int parse_multiprocessors(const std::string& text) {
  int out = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  if (error != std::errc() || end != text.data() + text.size() || out < 1)
    throw InputError(
        str("COHORT_MULTIPROCESSORS: expected a number from 1 on, such as 4, got '", text, "'"));
  return out;
}

GpuProperties read_properties(Device device) {
  cudaDeviceProp p;
  COHORT_CUDA_CHECK(cudaGetDeviceProperties(&p, device.index));
  GpuProperties out{.name = p.name,
                    .compute_capability = 10 * p.major + p.minor,
                    .multiprocessors = p.multiProcessorCount,
                    .shared_memory = static_cast<int64_t>(p.sharedMemPerBlockOptin),
                    .memory = static_cast<int64_t>(p.totalGlobalMem)};
  GpuLimit::Limits limits;
  if (const char* const text = std::getenv("COHORT_COMPUTE_CAPABILITY"); text != nullptr)
    limits.compute_capability = parse_compute_capability(text);
  if (const char* const text = std::getenv("COHORT_MULTIPROCESSORS"); text != nullptr)
    limits.multiprocessors = parse_multiprocessors(text);
  limit(out, limits);
  return out;
}

GpuProperties& properties_of(Device device) {
  static std::array<GpuProperties, kMaxDevices> properties;
  static std::array<std::once_flag, kMaxDevices> initialised;
  const auto i = static_cast<size_t>(device.index);
  std::call_once(initialised[i], [&] { properties[i] = read_properties(device); });
  return properties[i];
}

// A kernel's code on a device.
struct KernelCode {
  int compute_capability = 0;  // that it was compiled for, perhaps as PTX
  int64_t static_shared_memory = 0;
};
// Also lets the kernel use all shared memory of the device: changing the limit later would race
// with concurrent launches.
const KernelCode& code_of(const void* kernel, Device device) {
  static std::map<std::pair<const void*, int>, KernelCode> cache;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (const auto it = cache.find({kernel, device.index}); it != cache.end()) return it->second;
  activate(device);
  cudaFuncAttributes attributes;
  COHORT_CUDA_CHECK(with_memory([&] { return cudaFuncGetAttributes(&attributes, kernel); }));
  const auto used = static_cast<int>(attributes.sharedSizeBytes);
  COHORT_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device) - used));
  return cache[{kernel, device.index}] = {.compute_capability = attributes.ptxVersion,
                                          .static_shared_memory = used};
}

}  // namespace

void throw_error(cudaError_t code, const char* call, const char* file, int line) {
  cudaGetLastError();
  // Kernels run asynchronously: a later call may be the first to report that one has failed.
  std::string text = str("[cuda] ", is_fatal(code) ? "at or before " : "", call, ": ",
                         cudaGetErrorString(code), " (", cudaGetErrorName(code), ")");
  if (is_fatal(code))
    text +=
        "; the device's memory is lost and nothing more is written from it; hint: resume from the "
        "last checkpoint, and find the cause with compute-sanitizer";
  if (code == cudaErrorMemoryAllocation) {
    size_t available = 0, total = 0;
    if (cudaMemGetInfo(&available, &total) != cudaSuccess) cudaGetLastError();
    text += str(", with ", mib(static_cast<int64_t>(available)), " of ",
                mib(static_cast<int64_t>(total)), " free");
    throw OutOfMemoryError(with_location(text, file, line));
  }
  throw CudaError(with_location(text, file, line));
}

void release_cached_blocks() {
  cudaGetLastError();
  int device = 0;
  COHORT_CUDA_CHECK(cudaGetDevice(&device));
  allocator(Device::cuda(device)).release_cached();
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

const GpuProperties& gpu_properties(Device device) {
  return properties_of(device);
}
int compute_capability(Device device) {
  return gpu_properties(device).compute_capability;
}
GpuLimit::GpuLimit(Device device, const Limits& limits)
    : device_(device), before_(gpu_properties(device)) {
  limit(properties_of(device), limits);
}
GpuLimit::~GpuLimit() {
  properties_of(device_) = before_;
}

bool fits(const void* kernel, const KernelNeeds& needs, Device device) {
  const KernelCode& code = code_of(kernel, device);
  KernelNeeds all = needs;
  all.shared_memory += code.static_shared_memory;
  return code.compute_capability >= needs.compute_capability && fits(all, gpu_properties(device));
}

namespace {

int all_active_clusters(const void* kernel, int blocks, int block_threads, size_t shared_bytes,
                        Device device) {
  static std::map<std::tuple<const void*, int, int, size_t, int>, int> cache;
  static std::mutex mutex;
  code_of(kernel, device);  // allows the shared memory
  const std::lock_guard lock(mutex);
  const auto key = std::tuple(kernel, blocks, block_threads, shared_bytes, device.index);
  if (const auto it = cache.find(key); it != cache.end()) return it->second;
  activate(device);
  cudaLaunchAttribute cluster{.id = cudaLaunchAttributeClusterDimension};
  cluster.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
  cudaLaunchConfig_t config{.gridDim = static_cast<unsigned>(blocks),
                            .blockDim = static_cast<unsigned>(block_threads),
                            .dynamicSmemBytes = shared_bytes};
  config.attrs = &cluster;
  config.numAttrs = 1;
  int count = 0;
  const cudaError_t code =
      with_memory([&] { return cudaOccupancyMaxActiveClusters(&count, kernel, &config); });
  if (code == cudaErrorMemoryAllocation)
    throw_error(code, "cudaOccupancyMaxActiveClusters", __FILE__, __LINE__);
  // Any other error means that the device cannot run such a cluster.
  if (code != cudaSuccess) cudaGetLastError();
  return cache[key] = code == cudaSuccess ? count : 0;
}

}  // namespace

int active_clusters(const void* kernel, int blocks, int block_threads, size_t shared_bytes,
                    Device device) {
  const int all = all_active_clusters(kernel, blocks, block_threads, shared_bytes, device),
            multiprocessors = gpu_properties(device).multiprocessors;
  if (all == 0 || multiprocessors == 1) return 0;
  return std::max(1, all * multiprocessors / attribute(cudaDevAttrMultiProcessorCount, device));
}

int64_t resident_blocks(const void* kernel, int block_threads, size_t shared_bytes, Device device) {
  code_of(kernel, device);  // allows the shared memory
  activate(device);
  int per_multiprocessor = 0;
  COHORT_CUDA_CHECK(with_memory([&] {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, block_threads,
                                                         shared_bytes);
  }));
  return int64_t{per_multiprocessor} * attribute(cudaDevAttrMultiProcessorCount, device);
}

void allow_shared_memory(const char* name, const void* kernel, size_t bytes, Device device) {
  const KernelCode& code = code_of(kernel, device);
  check_shared_memory(name, static_cast<int64_t>(bytes),
                      gpu_properties(device).shared_memory - code.static_shared_memory);
}

void check_shared_memory(const char* name, int64_t bytes, int64_t limit) {
  COHORT_CHECK(bytes <= limit, "[", name, "] needs ", bytes >> 10,
               " KiB of shared memory per block, this GPU has ", limit >> 10);
}

namespace {
std::mutex trigger_mutex;
std::map<cudaStream_t, Trigger>& triggers() {
  static auto& all = *new std::map<cudaStream_t, Trigger>;  // never destroyed
  return all;
}
}  // namespace

void record_trigger(cudaStream_t stream, Trigger trigger) {
  const std::lock_guard lock(trigger_mutex);
  triggers()[stream] = trigger;
}
Trigger last_trigger(cudaStream_t stream) {
  const std::lock_guard lock(trigger_mutex);
  return triggers().contains(stream) ? triggers()[stream] : Trigger::kLate;
}

Stream default_stream(Device device) {
  static std::array<cudaStream_t, kMaxDevices> streams{};
  static std::array<std::once_flag, kMaxDevices> initialised;
  const auto i = static_cast<size_t>(device.index);
  std::call_once(initialised[i], [&] {
    activate(device);
    COHORT_CUDA_CHECK(
        with_memory([&] { return cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking); }));
  });
  return {device, streams[i]};
}

cudaStream_t stream(Device device) {
  activate(device);
  return static_cast<cudaStream_t>(current_stream(device).handle);
}

void synchronize(Stream stream) {
  activate(stream.device);
  const auto queue = static_cast<cudaStream_t>(stream.handle);
  COHORT_CUDA_CHECK(cudaStreamSynchronize(queue));
  record_trigger(queue, Trigger::kLate);
}

void synchronize_all_streams(Device device) {
  activate(device);
  COHORT_CUDA_CHECK(cudaDeviceSynchronize());
}

void order_streams(Stream earlier, Stream later) {
  if (earlier.handle == later.handle) return;
  Event event(earlier.device);
  event.record(earlier);
  event.wait(later);
}

OwnedStream::OwnedStream(Device device, Priority priority) : stream_{device, nullptr} {
  activate(device);
  cudaStream_t handle = nullptr;
  int lowest = 0, highest = 0;
  COHORT_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  COHORT_CUDA_CHECK(with_memory([&] {
    return cudaStreamCreateWithPriority(&handle, cudaStreamNonBlocking,
                                        priority == Priority::kHighest ? highest : lowest);
  }));
  stream_.handle = handle;
}
OwnedStream::~OwnedStream() {
  // The allocator identifies streams by handle, and a new stream may get this handle.
  cudaStreamSynchronize(static_cast<cudaStream_t>(stream_.handle));
  cudaStreamDestroy(static_cast<cudaStream_t>(stream_.handle));
}

Event::Event(Device device) : device_(device) {
  activate(device);
  COHORT_CUDA_CHECK(
      with_memory([&] { return cudaEventCreateWithFlags(&event_, cudaEventDisableTiming); }));
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
