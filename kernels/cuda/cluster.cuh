// Thread block clusters of sm_90: blocks that run at the same time and read each other's shared
// memory. Only code for sm_90 and newer may call these.
#pragma once

#include <cstdint>

namespace cohort::kernels::cuda {

// A barrier of all threads of the cluster, which orders their accesses to shared memory.
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

}  // namespace cohort::kernels::cuda
