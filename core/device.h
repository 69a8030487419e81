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
  bool is_cpu() const { return type == DeviceType::kCPU; }
  bool operator==(const Device&) const = default;
  // "cpu", "cuda:0".
  std::string str() const;
};

// "cpu", "cuda" or "cuda:N". Throws InputError for other text and for a CUDA device that this build
// or machine does not have, saying which of the two.
Device parse_device(const std::string& text);

// An ordered queue of work on one device; `handle` is a cudaStream_t there and null on the CPU.
struct Stream {
  Device device;
  void* handle = nullptr;
};

// The stream that kernels enqueue on in this thread (default: the CPU).
Stream current_stream();

// Makes `stream` current in this thread until the guard goes.
class StreamGuard {
 public:
  explicit StreamGuard(Stream stream);
  ~StreamGuard();
  StreamGuard(const StreamGuard&) = delete;
  StreamGuard& operator=(const StreamGuard&) = delete;

 private:
  Stream previous_;
};

}  // namespace cohort
