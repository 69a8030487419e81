#include "trainers/host_state.h"

#include <algorithm>

#include "core/sizes.h"
#include "core/with_cuda.h"

namespace cohort {
namespace {

std::unique_ptr<BufferCopies> make_direct_copies(Device, size_t) {
  return std::make_unique<BufferCopies>();
}

// Elements [begin, begin + count) of a tensor in row-major order.
Tensor elements(const Tensor& t, int64_t begin, int64_t count) {
  return t.reshape({t.numel()}).narrow(0, begin, count);
}

}  // namespace

HostState::HostState(std::span<const kernels::AdamWTensor> tensors, int64_t chunk)
    : moments_(tensors[0].m.dtype()),
      has_low_bits_(std::ranges::any_of(
          tensors, [](const kernels::AdamWTensor& t) { return t.low_bits.defined(); })),
      device_(tensors[0].param.device()),
      copies_(is_dry_run() ? make_direct_copies(device_, kBuffers)
                           : on_device<make_direct_copies, cuda::make_buffer_copies>(
                                 device_, device_, kBuffers)) {
  constexpr int64_t kAlignment = 64;  // elements, for vectorized accesses
  COHORT_CHECK(chunk > 0 && chunk % kAlignment == 0, "[host_state] a chunk of ", chunk,
               " elements is no multiple of ", kAlignment);
  int64_t used = chunk;  // elements of the last chunk
  for (size_t i = 0; i < tensors.size(); ++i)
    for (int64_t begin = 0, size = tensors[i].param.numel(); begin < size;) {
      if (used == chunk) {
        chunks_.emplace_back();
        used = 0;
      }
      const int64_t count = std::min(size - begin, chunk - used);
      chunks_.back().push_back({.tensor = i, .begin = begin, .count = count, .at = used});
      begin += count;
      used = round_up(used + count, kAlignment);
      chunk_size_ = std::max(chunk_size_, used);
    }
}

void HostState::allocate_buffers() {
  while (buffers_.size() < std::min(kBuffers, chunks_.size()))
    buffers_.push_back({.m = Tensor::empty({chunk_size_}, moments_, device_),
                        .v = Tensor::empty({chunk_size_}, moments_, device_),
                        .low_bits = has_low_bits_
                                        ? Tensor::empty({2 * chunk_size_}, DType::kU8, device_)
                                        : Tensor()});
}

void HostState::step(std::span<kernels::AdamWTensor> tensors, const kernels::AdamWDesc& desc) {
  copies_->begin();
  for (size_t c = 0; c < chunks_.size(); ++c) {
    const size_t slot = c % kBuffers;
    const Buffer& buffer = buffers_[slot];
    std::vector<kernels::AdamWTensor> parts;
    std::vector<std::pair<Tensor, Tensor>> pairs;  // on the device, on the host
    for (const Part& part : chunks_[c]) {
      const kernels::AdamWTensor& whole = tensors[part.tensor];
      kernels::AdamWTensor& t = parts.emplace_back(whole);
      t.param = elements(whole.param, part.begin, part.count);
      t.grad = elements(whole.grad, part.begin, part.count);
      t.flat_index = whole.flat_index + part.begin;
      t.m = buffer.m.narrow(0, part.at, part.count);
      t.v = buffer.v.narrow(0, part.at, part.count);
      pairs.emplace_back(t.m, elements(whole.m, part.begin, part.count));
      pairs.emplace_back(t.v, elements(whole.v, part.begin, part.count));
      if (!whole.low_bits.defined()) continue;
      t.low_bits = buffer.low_bits.narrow(0, 2 * part.at, 2 * part.count);
      pairs.emplace_back(t.low_bits, elements(whole.low_bits, 2 * part.begin, 2 * part.count));
    }
    copies_->in(slot, [&] {
      for (auto& [on_device, on_host] : pairs) on_device.copy_async_(on_host);
    });
    kernels::adamw_step(parts, desc);
    copies_->out(slot, [&] {
      for (auto& [on_device, on_host] : pairs) on_host.copy_async_(on_device);
    });
  }
  copies_->end();
}

}  // namespace cohort
