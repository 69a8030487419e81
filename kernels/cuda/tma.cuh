// The copy engine of sm_90 and the barriers in shared memory that count what it has copied, one
// wrapper each. Only code for sm_90 and newer may call them.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace cohort::kernels::cuda {

// A barrier's phase ends when `arrivals` threads have arrived and all announced bytes are there.
// The threads that use it wait for each other (__syncthreads()) after the calls.
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile(
      "mbarrier.init.shared.b64 [%0], %1;\n"
      "fence.mbarrier_init.release.cluster;\n" ::"r"(barrier),
      "r"(arrivals)
      : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("{.reg .b64 s; mbarrier.arrive.shared.b64 s, [%0];}\n" ::"r"(barrier) : "memory");
}
// Arrives, and announces bytes that tma_load() will copy.
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, int bytes) {
  asm volatile("{.reg .b64 s; mbarrier.arrive.expect_tx.shared.b64 s, [%0], %1;}\n" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}
// Whether the phase of this parity (0 for the first one) has ended.
__device__ __forceinline__ bool barrier_is_done(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  asm volatile(
      "{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
      "@!p bra again;\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Starts the copy of the box at (x, y, z) of a tensor to shared memory (aligned to 1 KiB for the
// swizzle of 128 bytes); what lies outside the tensor becomes zeros. One thread calls it.
__device__ __forceinline__ void tma_load(uint32_t to, const CUtensorMap* map, int x, int y, int z,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%2, %3, %4}], [%5];\n" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}
// Fetches the description of a tensor, which the first copy would wait for.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

}  // namespace cohort::kernels::cuda
