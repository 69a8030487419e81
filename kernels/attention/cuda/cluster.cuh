// Thread block clusters of sm_90: blocks that run at the same time and read each other's shared
// memory. In code for older GPUs a cluster is one block.
#pragma once

#include <cstdint>

namespace cohort::kernels::cuda {

// A barrier of all threads of the cluster, which orders their accesses to shared memory.
__device__ __forceinline__ void cluster_sync() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;\n" ::
          : "memory");
#else
  __syncthreads();
#endif
}

// What `p`, in this block's shared memory, is in that of block `rank` of the cluster.
template <class T>
__device__ __forceinline__ const T* in_block(const T* p, [[maybe_unused]] int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const T* there;
  asm volatile("mapa.u64 %0, %1, %2;\n" : "=l"(there) : "l"(p), "r"(rank));
  return there;
#else
  return p;
#endif
}

}  // namespace cohort::kernels::cuda
