// Host memory to the device through page-locked chunks. cudaMemcpyAsync may read pageable memory
// after it has returned (it does where the GPU can read such memory itself), and tensors on the
// host are freed or written again at once.
#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>

#include "core/allocator.h"
#include "core/cuda.h"
#include "core/replay.h"

namespace cohort::cuda {
namespace {

constexpr size_t kChunk = size_t{1} << 20;
constexpr size_t kAlignment = 64;

// One device's chunks, in turn. Small uploads of one stream share a chunk; the host waits only when
// the device is all the chunks behind.
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
      const size_t piece = std::min(bytes, kChunk - used_);
      std::memcpy(chunk.memory + used_, from, piece);
      COHORT_CUDA_CHECK(cudaMemcpyAsync(to, chunk.memory + used_, piece, cudaMemcpyHostToDevice,
                                        static_cast<cudaStream_t>(stream.handle)));
      chunk.read.record(stream);
      used_ += (piece + kAlignment - 1) / kAlignment * kAlignment;
      to += piece;
      from += piece;
      bytes -= piece;
    }
  }

 private:
  struct Chunk {
    explicit Chunk(Device device)
        : memory(static_cast<char*>(pinned_allocator().allocate(kChunk))), read(device) {}
    char* memory;
    Event read;  // all that was copied from it
  };

  std::mutex mutex_;
  std::array<Chunk, 4> chunks_;
  size_t current_ = 0, used_ = kChunk;
  const void* user_ = nullptr;
};

}  // namespace

void upload(void* to, const void* from, size_t bytes, Device device) {
  static std::array<UploadRing*, kMaxDevices> rings{};  // never destroyed: see allocator()
  static std::array<std::once_flag, kMaxDevices> known;
  const auto i = static_cast<size_t>(device.index);
  COHORT_CHECK(!is_recording(device),
               "[upload] not in recorded work: replays would read what the chunk holds by then");
  std::call_once(known[i], [&] { rings[i] = new UploadRing(device); });
  rings[i]->upload(static_cast<char*>(to), static_cast<const char*>(from), bytes,
                   current_stream(device));
}

}  // namespace cohort::cuda
