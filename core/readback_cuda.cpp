// Asynchronous copies: from the device through page-locked memory, and between such memory and it.
#include <cstring>

#include "core/cuda.h"
#include "core/cuda_backend.h"

namespace cohort::cuda {
namespace {

struct Copy : NonCopyable {
  explicit Copy(const Tensor& t)
      : done(t.device()),
        bytes(static_cast<size_t>(t.nbytes())),
        memory(pinned_allocator().allocate(bytes)) {}
  ~Copy() {
    // The device may still be writing if finish_readback() was not called.
    try {
      done.synchronize();
    } catch (const Error&) {
    }
    pinned_allocator().deallocate(memory, bytes);
  }
  Event done;
  size_t bytes;
  void* memory;  // allocated last, because nothing frees it if the constructor throws
};

}  // namespace

std::shared_ptr<void> start_readback(const Tensor& t, Tensor& host) {
  COHORT_CHECK(t.is_contiguous(), "[readback] expected a contiguous tensor, got ", t.str());
  host = Tensor::empty(t.shape(), t.dtype());
  auto copy = std::make_shared<Copy>(t);
  const cudaStream_t queue = stream(t.device());
  COHORT_CUDA_CHECK(
      cudaMemcpyAsync(copy->memory, t.raw(), copy->bytes, cudaMemcpyDeviceToHost, queue));
  copy->done.record(current_stream(t.device()));
  return copy;
}

void finish_readback(const std::shared_ptr<void>& copy, Tensor& host) {
  auto& pending = *static_cast<Copy*>(copy.get());
  pending.done.synchronize();
  std::memcpy(host.raw(), pending.memory, pending.bytes);
}

void copy_async(Tensor& to, const Tensor& from) {
  const Device device = to.device().is_cuda() ? to.device() : from.device();
  COHORT_CUDA_CHECK(cudaMemcpyAsync(to.raw(), from.raw(), static_cast<size_t>(to.nbytes()),
                                    cudaMemcpyDefault, stream(device)));
  record_trigger(stream(device), Trigger::kLate);
}

}  // namespace cohort::cuda
