// Thread block clusters of sm_90 and their distributed shared memory. Only code for sm_90 and newer
// may call these.
#pragma once

#include <cstdint>

#include "kernels/cuda/mma.cuh"

namespace cohort::kernels::cuda {

// Barrier of all threads of the cluster with release and acquire semantics. It waits for their
// writes to global memory as well, which is slow while many are pending.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;\n" ::
          : "memory");
}

// Its halves, of which the first does not order memory accesses: the second waits until all threads
// of the cluster have started and arrived.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}

// Address of `p` mapped to the shared memory of block `rank` of the cluster.
template <class T>
__device__ __forceinline__ T* in_block(T* p, int rank) {
  T* mapped;
  asm volatile("mapa.u64 %0, %1, %2;\n" : "=l"(mapped) : "l"(p), "r"(rank));
  return mapped;
}

// Asynchronously stores `value` to `to` in the shared memory of block `rank`. Completion counts as
// transaction bytes of that block's `barrier`: a thread that waits on it sees the value.
__device__ __forceinline__ void store_in_block(int rank, const float* to, float value,
                                               uint32_t barrier) {
  asm volatile(
      "{\n.reg .b32 mapped, counter;\n"
      "mapa.shared::cluster.u32 mapped, %0, %3;\n"
      "mapa.shared::cluster.u32 counter, %2, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [mapped], %1, [counter];\n}\n" ::
          "r"(shared_address(to)),
      "f"(value), "r"(barrier), "r"(rank)
      : "memory");
}
__device__ __forceinline__ void store_in_block(int rank, const double2* to, double2 value,
                                               uint32_t barrier) {
  asm volatile(
      "{\n.reg .b32 mapped, counter;\n"
      "mapa.shared::cluster.u32 mapped, %0, %4;\n"
      "mapa.shared::cluster.u32 counter, %3, %4;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f64 [mapped], {%1, %2}, "
      "[counter];\n}\n" ::"r"(shared_address(to)),
      "d"(value.x), "d"(value.y), "r"(barrier), "r"(rank)
      : "memory");
}

}  // namespace cohort::kernels::cuda
