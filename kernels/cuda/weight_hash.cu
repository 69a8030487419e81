// One launch per tensor: blocks add their sums to the hash by atomic additions of integers, whose
// order does not matter.
#include "kernels/cuda/device.cuh"
#include "kernels/weight_hash.h"

namespace cohort::kernels::cuda {
namespace {

constexpr int kThreads = 256, kPacks = 8;                       // 16-byte accesses of a thread
constexpr int64_t kPerBlock = int64_t{16} * kThreads * kPacks;  // bytes

// Word `i` of `size` bytes at `p`, which may lie at any address.
__device__ uint32_t word_at(const uint8_t* p, int64_t i, int64_t size) {
  uint32_t word = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k)
    if (4 * i + k < size) word |= static_cast<uint32_t>(p[4 * i + k]) << 8 * k;
  return word;
}

__global__ void __launch_bounds__(kThreads)
    weight_hash_kernel(unsigned long long* hash, const uint8_t* p, int64_t size, uint64_t first) {
  __shared__ uint64_t scratch[kThreads / 32];
  const bool aligned = reinterpret_cast<uintptr_t>(p) % 16 == 0;
  const int64_t begin = blockIdx.x * kPerBlock + 16 * static_cast<int64_t>(threadIdx.x);
  Pack<uint32_t, 4> packs[kPacks] = {};
#pragma unroll
  for (int u = 0; u < kPacks; ++u) {
    const int64_t at = begin + int64_t{16} * kThreads * u;
    if (aligned && at + 16 <= size) {
      packs[u] = load_pack<4>(reinterpret_cast<const uint32_t*>(p + at));
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) packs[u].v[k] = word_at(p, at / 4 + k, size);
    }
  }
  uint64_t sum = 0;
#pragma unroll
  for (int u = 0; u < kPacks; ++u)
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int64_t i = (begin + int64_t{16} * kThreads * u) / 4 + k;
      if (4 * i < size) sum += hashed_word(packs[u].v[k], first + static_cast<uint64_t>(i));
    }
  sum = block_reduce<kThreads>(sum, scratch, Plus{});
  if (threadIdx.x == 0) atomicAdd(hash, static_cast<unsigned long long>(sum));
}

}  // namespace

void weight_hash(Tensor& hash, std::span<const Tensor> tensors) {
  hash.fill_(0);
  uint64_t first = 0;
  for (const Tensor& t : tensors) {
    const auto size = static_cast<int64_t>(t.nbytes());
    launch("weight_hash", weight_hash_kernel, {blocks_for(size, kPerBlock), kThreads},
           hash.device(), static_cast<unsigned long long*>(hash.raw()),
           static_cast<const uint8_t*>(t.raw()), size, first);
    first += static_cast<uint64_t>((size + 3) / 4);
  }
}

}  // namespace cohort::kernels::cuda
