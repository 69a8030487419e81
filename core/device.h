// Devices and streams. CPU work is complete when a call returns; CUDA work is ordered by the
// stream. The current stream is thread-local: several ranks can live in one process.
#pragma once

#include <cstdint>
#include <string>

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
  std::string str() const;
};

// CUDA devices of this machine that this build can use; 0 without CUDA.
int cuda_device_count();
// "2 usable CUDA devices", and if there are none, why.
std::string usable_cuda_devices();

// Bytes per second that a CUDA device's memory could move by its clock and width; 0 for others.
double memory_bandwidth(Device device);

// "cpu", "cuda" or "cuda:N". Throws InputError for other text; `key`: what errors call the setting.
Device device_named(const std::string& text, const std::string& key);
// The same; throws InputError for a CUDA device that this build or machine does not have, too,
// saying which of the two.
Device parse_device(const std::string& text, const std::string& key);

// An ordered queue of work on one device; `handle` is a cudaStream_t there and null on the CPU.
struct Stream {
  Device device;
  void* handle = nullptr;
};

// The stream that kernels on `device` enqueue on in this thread: that of the innermost StreamGuard
// for the device, else the device's own (one per process, not CUDA's legacy stream).
Stream current_stream(Device device);

// Blocks until the device has done everything that this thread's current stream holds. Nothing on
// the CPU.
void synchronize(Device device);

// Makes `stream` current in this thread until the guard goes.
class StreamGuard {
 public:
  explicit StreamGuard(Stream stream);
  ~StreamGuard();
  StreamGuard(const StreamGuard&) = delete;
  StreamGuard& operator=(const StreamGuard&) = delete;

 private:
  friend Stream current_stream(Device);
  const Stream stream_;
  const StreamGuard* const outer_;
};

}  // namespace cohort
