// Optimizer state in page-locked memory of the host, as in ZeRO-Offload (Ren et al. 2021), but
// AdamW runs on the device, on chunks of the state that pass through three buffers. One chunk
// comes in and another goes out, on copy streams of their own, while AdamW works on a third.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/non_copyable.h"
#include "kernels/optimizer.h"

namespace cohort {

// Copies to and from buffers on a device, beside the work of its current stream. Those of this
// class are complete when their call returns, as on the CPU.
class BufferCopies {
 public:
  virtual ~BufferCopies() = default;
  // The copies from now on start after all work now in the current stream.
  virtual void begin() {}
  // Calls `copies`, which enqueues copies to buffer i. They start once those of the last out() of
  // that buffer have ended, and later work on the current stream waits for them.
  virtual void in(size_t /*i*/, const std::function<void()>& copies) { copies(); }
  // Calls `copies`, which enqueues copies from buffer i. They start after all work now in the
  // current stream.
  virtual void out(size_t /*i*/, const std::function<void()>& copies) { copies(); }
  // Makes later work on the current stream wait for all copies.
  virtual void end() {}
  // Blocks until all copies have ended.
  virtual void synchronize() {}
};

class HostState : NonCopyable {
 public:
  static constexpr int64_t kChunk = int64_t{16} << 20;  // elements

  // The tensors have one device, and one dtype of moments. Moments and low bits are in the host's
  // memory (Tensor::pinned()). A chunk has at most `chunk` elements, a multiple of 64.
  explicit HostState(std::span<const kernels::AdamWTensor> tensors, int64_t chunk = kChunk);

  // The buffers on the device, three chunks.
  void allocate_buffers();
  void free_buffers() { buffers_.clear(); }
  // kernels::adamw_step() of the tensors, to the bit. The buffers exist; the host's memory has the
  // result after synchronize().
  void step(std::span<kernels::AdamWTensor> tensors, const kernels::AdamWDesc& desc);
  void synchronize() const { copies_->synchronize(); }

 private:
  // Elements [begin, begin + count) of a tensor, at `at` in its chunk.
  struct Part {
    size_t tensor = 0;
    int64_t begin = 0, count = 0, at = 0;
  };
  struct Buffer {
    Tensor m, v, low_bits;
  };
  static constexpr size_t kBuffers = 3;

  std::vector<std::vector<Part>> chunks_;
  int64_t chunk_size_ = 0;  // elements of the largest
  DType moments_;
  bool has_low_bits_;  // some of the tensors
  Device device_;
  std::unique_ptr<BufferCopies> copies_;
  std::vector<Buffer> buffers_;
};

namespace cuda {
std::unique_ptr<BufferCopies> make_buffer_copies(Device device, size_t buffers);
}

}  // namespace cohort
