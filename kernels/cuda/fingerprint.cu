// Blocks add their sums by atomic additions of integers, whose order does not matter.
#include "kernels/cuda/device.cuh"
#include "kernels/fingerprint.h"

namespace cohort::kernels::cuda {
namespace {

constexpr int kThreads = 256, kPacks = 8;                       // 16-byte accesses of a thread
constexpr int64_t kPerBlock = int64_t{16} * kThreads * kPacks;  // bytes

__global__ void __launch_bounds__(kThreads)
    fingerprint_kernel(unsigned long long* out, const uint8_t* p, int64_t size, uint64_t address) {
  __shared__ uint64_t scratch[kThreads / 32];
  const bool aligned = reinterpret_cast<uintptr_t>(p) % 16 == 0;
  const int64_t begin = blockIdx.x * kPerBlock + 16 * static_cast<int64_t>(threadIdx.x);
  Pack<uint16_t, 8> packs[kPacks] = {};
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    const int64_t at = begin + int64_t{16} * kThreads * u;
    if (aligned && at + 16 <= size) {
      packs[u] = load_pack<8>(reinterpret_cast<const uint16_t*>(p + at));
    } else {
#pragma unroll
      for (int k = 0; k < 16; ++k)
        if (at + k < size) packs[u].v[k / 2] |= static_cast<uint16_t>(p[at + k] << 8 * (k % 2));
    }
  }
  uint64_t sum = 0;
#pragma unroll
  for (int u = 0; u < kPacks; ++u)
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int64_t i = (begin + int64_t{16} * kThreads * u) / 2 + k;
      if (2 * i < size) sum += mix_word(address + static_cast<uint64_t>(i), packs[u].v[k]);
    }
  sum = block_reduce<kThreads>(sum, scratch, Plus{});
  if (threadIdx.x == 0) atomicAdd(out, static_cast<unsigned long long>(sum));
}

}  // namespace

void fingerprint(Tensor& sum, const Tensor& t, int64_t address) {
  const auto size = static_cast<int64_t>(t.nbytes());
  launch("fingerprint", fingerprint_kernel, {blocks_for(size, kPerBlock), kThreads}, sum.device(),
         static_cast<unsigned long long*>(sum.raw()), static_cast<const uint8_t*>(t.raw()), size,
         static_cast<uint64_t>(address));
}

}  // namespace cohort::kernels::cuda
