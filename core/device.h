// Devices and streams. CPU work is complete when a call returns; CUDA work is ordered by the
// stream. The current stream, with the memory and the launch rules of its work, is thread-local:
// several ranks can live in one process.
#pragma once

#include <cstdint>
#include <string>

#include "core/non_copyable.h"

namespace cohort {

enum class DeviceType : uint8_t { kCPU, kCUDA };

struct Device {
  DeviceType type = DeviceType::kCPU;
  int index = 0;
  static Device cuda(int index = 0) { return {DeviceType::kCUDA, index}; }
  bool is_cpu() const { return type == DeviceType::kCPU; }
  bool is_cuda() const { return type == DeviceType::kCUDA; }
  bool operator==(const Device&) const = default;
  // "cpu", "cuda:0".
  std::string str() const { return is_cpu() ? "cpu" : "cuda:" + std::to_string(index); }
};

// Number of CUDA devices of this machine that this build can use; 0 without CUDA.
int cuda_device_count();
// "2 usable CUDA devices"; if there are none, with the reason.
std::string usable_cuda_devices();

// Theoretical memory bandwidth of a CUDA device in bytes per second; 0 for other devices.
double memory_bandwidth(Device device);

// Parses "cpu", "cuda" or "cuda:N". Throws InputError for other text; errors name the setting
// `key`.
Device device_named(const std::string& text, const std::string& key);
// Like device_named(), but also throws InputError if this build has no CUDA support or this machine
// no such device.
Device parse_device(const std::string& text, const std::string& key);

// An ordered queue of work on one device, and what holds for the work that is enqueued through this
// value of it.
struct Stream {
  Device device;
  void* handle = nullptr;  // a cudaStream_t; null on the CPU
  uint64_t pool = 0;       // the MemoryPool that it allocates from; 0: the stream's own
  // Kernels may prefetch some inputs before the grids they depend on have ended (kernels/common.h).
  bool may_prefetch = false;
};

// The stream on which this thread enqueues kernels of `device`: that of the innermost StreamGuard
// for the device, else the device's default (one per process, not CUDA's legacy stream).
Stream current_stream(Device device);

// Blocks until all work in this thread's current stream has completed. A no-op on the CPU.
void synchronize(Device device);

// Work enqueued on `later` from now on starts after what is in `earlier` now, of the same device. A
// no-op on the CPU.
void order_streams(Stream earlier, Stream later);

// Makes `stream` current in this thread for the lifetime of the guard.
class StreamGuard : NonCopyable {
 public:
  explicit StreamGuard(Stream stream);
  ~StreamGuard();

 private:
  friend Stream current_stream(Device);
  const Stream stream_;
  const StreamGuard* const outer_;
};

}  // namespace cohort
