// Uploads of host memory through page-locked chunks. cudaMemcpyAsync may read pageable memory after
// it returns (if the GPU can access such memory directly), but host tensors may be freed or
// overwritten immediately.
#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>

#include "core/allocator.h"
#include "core/cuda.h"
#include "core/graph.h"

namespace cohort::cuda {
namespace {

constexpr size_t kChunk = size_t{1} << 20;
constexpr size_t kAlignment = 64;

// Ring of chunks of a device. Small uploads of a stream share a chunk; the host waits only if the
// device has not yet read the oldest chunk.
class UploadRing {
 public:
  explicit UploadRing(Device device)
      : chunks_{Chunk(device), Chunk(device), Chunk(device), Chunk(device)} {}

  void upload(char* to, const char* from, size_t bytes, Stream stream) {
    std::lock_guard lock(mutex_);
    while (bytes > 0) {
      if (used_ == kChunk || stream.handle != user_) {
        current_ = (current_ + 1) % chunks_.size();
        chunks_[current_].read.synchronize();
        used_ = 0;
        user_ = stream.handle;
      }
      Chunk& chunk = chunks_[current_];
      const size_t count = std::min(bytes, kChunk - used_);
      std::memcpy(chunk.memory + used_, from, count);
      COHORT_CUDA_CHECK(cudaMemcpyAsync(to, chunk.memory + used_, count, cudaMemcpyHostToDevice,
                                        static_cast<cudaStream_t>(stream.handle)));
      chunk.read.record(stream);
      used_ += (count + kAlignment - 1) / kAlignment * kAlignment;
      to += count;
      from += count;
      bytes -= count;
    }
  }

 private:
  struct Chunk {
    explicit Chunk(Device device)
        : read(device), memory(static_cast<char*>(pinned_allocator().allocate(kChunk))) {}
    ~Chunk() { pinned_allocator().deallocate(memory, kChunk); }
    Event read;  // after the last copy from it
    char* memory;
  };

  std::mutex mutex_;
  std::array<Chunk, 4> chunks_;
  size_t current_ = 0, used_ = kChunk;
  const void* user_ = nullptr;
};

}  // namespace

void upload(void* to, const void* from, size_t bytes, Device device) {
  static std::array<UploadRing*, kMaxDevices> rings{};  // never destroyed: see allocator()
  static std::array<std::once_flag, kMaxDevices> initialised;
  const auto i = static_cast<size_t>(device.index);
  COHORT_CHECK(
      !is_capturing(device),
      "[upload] not allowed during graph capture: replays would read the chunk's later contents");
  std::call_once(initialised[i], [&] { rings[i] = new UploadRing(device); });
  rings[i]->upload(static_cast<char*>(to), static_cast<const char*>(from), bytes,
                   current_stream(device));
  record_trigger(stream(device), Trigger::kLate);
}

}  // namespace cohort::cuda
