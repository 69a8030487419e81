// The one place that starts kernels: the launch, the error check and the range that a profiler
// shows.
//
//   cuda::launch("rms_norm", rms_norm_kernel<float>, {rows, 256}, x.device(), px, pw, py);
#pragma once

#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <utility>

#include "core/cuda.h"

namespace cohort::cuda {

enum class Start {
  kAfterPrevious,  // when all that was enqueued before has ended
  // When the kernel before it has let it or ends, to hide what a launch costs. Every thread of the
  // kernel calls wait_for_previous() before it touches memory that another kernel writes or reads.
  // GPUs older than sm_90, and code for them, start it after the previous one.
  kBesidePrevious
};

struct LaunchShape {
  dim3 grid, block;
  size_t shared_bytes = 0;  // dynamic shared memory; over 48 KiB is asked for as needed
  Start start = Start::kAfterPrevious;
  dim3 cluster = 1;  // blocks of a thread block cluster, which sm_90 has
};

// Waits until all kernels that were enqueued before this one have ended and what they wrote can be
// read.
__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}
// Lets the next kernel start beside this one, once every block has called it: to be called early,
// since the next one waits by itself.
__device__ __forceinline__ void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

// Both: the first line of a kernel that has nothing to do before the previous one has ended.
__device__ __forceinline__ void start_beside_previous() {
  let_next_start();
  wait_for_previous();
}

// Enqueues `kernel` on the device's current stream. An empty grid launches nothing. Throws Error
// naming `name` if the GPU has too little shared memory, CudaError if the launch fails; what goes
// wrong later shows at the next synchronisation.
template <class... Params, class... Args>
void launch(const char* name, void (*kernel)(Params...), const LaunchShape& shape, Device device,
            Args&&... args) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
  const cudaStream_t queue = stream(device);
  // The limit of 48 KiB that needs no asking includes what the kernel declares itself.
  if (shape.shared_bytes > (32u << 10))
    allow_shared_memory(name, reinterpret_cast<const void*>(kernel), shape.shared_bytes, device);
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = queue;
  config.attrs = attributes;
  // Code for older GPUs holds no wait.
  if (shape.start == Start::kBesidePrevious &&
      is_for_hopper(reinterpret_cast<const void*>(kernel), device)) {
    cudaLaunchAttribute& beside = attributes[config.numAttrs++];
    beside.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    beside.val.programmaticStreamSerializationAllowed = 1;
  }
  if (const dim3& c = shape.cluster; c.x * c.y * c.z > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {c.x, c.y, c.z};
  }
  nvtxRangePushA(name);
  const cudaError_t code = cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
  nvtxRangePop();
  if (code != cudaSuccess) throw_error(code, name, __FILE__, __LINE__);
}

// Blocks for `n` items at `per_block` each, as a grid dimension. Throws Error past its limit.
inline unsigned blocks_for(int64_t n, int64_t per_block) {
  const int64_t blocks = (n + per_block - 1) / per_block;
  COHORT_CHECK(blocks <= 0x7fffffff, "[launch] ", n, " items need too large a grid");
  return static_cast<unsigned>(std::max<int64_t>(blocks, 0));
}

}  // namespace cohort::cuda
