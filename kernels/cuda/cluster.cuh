// Thread block clusters of sm_90: blocks that run at the same time and read each other's shared
// memory. Only code for sm_90 and newer may call these.
#pragma once

#include <cstdint>

namespace cohort::kernels::cuda {

// The two halves of a barrier of all threads of the cluster, which orders their accesses to memory:
// those before any thread's first half come before those after any thread's second half. The first
// half waits for the thread's own writes.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}
__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// What `p`, in this block's shared memory, is in that of block `rank` of the cluster.
template <class T>
__device__ __forceinline__ const T* in_block(const T* p, int rank) {
  const T* there;
  asm volatile("mapa.u64 %0, %1, %2;\n" : "=l"(there) : "l"(p), "r"(rank));
  return there;
}

}  // namespace cohort::kernels::cuda
