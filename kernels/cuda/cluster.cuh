// Thread block clusters of sm_90: blocks that run at the same time and read each other's shared
// memory. Only code for sm_90 and newer may call these.
#pragma once

#include <cstdint>

#include "kernels/cuda/mma.cuh"

namespace cohort::kernels::cuda {

// A barrier of all threads of the cluster, which orders their accesses to memory: it waits for all
// that they have written, to global memory, too, which takes long while many do.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;\n" ::
          : "memory");
}

// What `p`, in this block's shared memory, is in that of block `rank` of the cluster.
template <class T>
__device__ __forceinline__ const T* in_block(const T* p, int rank) {
  const T* there;
  asm volatile("mapa.u64 %0, %1, %2;\n" : "=l"(there) : "l"(p), "r"(rank));
  return there;
}

// Starts to write `value` to the place of `to` in the shared memory of block `rank`; when it is
// there, that block's `barrier` counts its bytes, which orders the write before what a thread does
// after it has waited for them.
__device__ __forceinline__ void store_in_block(int rank, const float* to, float value,
                                               uint32_t barrier) {
  asm volatile(
      "{\n.reg .b32 there, counts;\n"
      "mapa.shared::cluster.u32 there, %0, %3;\n"
      "mapa.shared::cluster.u32 counts, %2, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %1, [counts];\n}\n" ::"r"(
          shared_address(to)),
      "f"(value), "r"(barrier), "r"(rank)
      : "memory");
}
__device__ __forceinline__ void store_in_block(int rank, const double2* to, double2 value,
                                               uint32_t barrier) {
  asm volatile(
      "{\n.reg .b32 there, counts;\n"
      "mapa.shared::cluster.u32 there, %0, %4;\n"
      "mapa.shared::cluster.u32 counts, %3, %4;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f64 [there], {%1, %2}, "
      "[counts];\n}\n" ::"r"(shared_address(to)),
      "d"(value.x), "d"(value.y), "r"(barrier), "r"(rank)
      : "memory");
}

}  // namespace cohort::kernels::cuda
