// Kernel launch: the only launcher in the project, with error check and NVTX range.
//
//   cuda::launch("rms_norm", rms_norm_kernel<float>, {rows, 256}, x.device(), px, pw, py);
#pragma once

#include <nvtx3/nvToolsExt.h>

#include <algorithm>

#include "core/cuda.h"
#include "core/graph.h"

namespace cohort::cuda {

enum class Start {
  kAfterPrevious,  // in stream order
  // Programmatic dependent launch, which hides launch latency: may start when the previous grid
  // calls launch_dependent_grids(). Every thread must call wait_on_dependent_grids() before it
  // accesses memory that another kernel writes or reads. kAfterPrevious before sm_90.
  kProgrammatic
};

struct LaunchShape {
  dim3 grid, block;
  size_t shared_bytes = 0;  // dynamic shared memory; above 48 KiB it is opted in
  Start start = Start::kAfterPrevious;
  Trigger trigger = Trigger::kEarly;  // kLate is a promise of the kernel
  dim3 cluster = 1;                   // thread block cluster dimensions (sm_90)
};

// Waits until all preceding grids have completed and their writes are visible.
__device__ __forceinline__ void wait_on_dependent_grids() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}
// Allows the next grid to launch once every block has called this. Call it early, because the next
// grid waits in wait_on_dependent_grids().
__device__ __forceinline__ void launch_dependent_grids() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

// First statement of a kernel that has no work independent of the previous grid.
__device__ __forceinline__ void launch_dependents_and_wait() {
  launch_dependent_grids();
  wait_on_dependent_grids();
}

// Enqueues `kernel` on the device's current stream. An empty grid launches nothing. With
// COHORT_SPIN_LIMIT it also waits for the kernel, unless a graph is being captured, so that an
// error names the kernel that failed. Throws Error
// naming `name` if the GPU has too little shared memory, OutOfMemoryError if there is no memory for
// the kernel's code, CudaError if the launch fails otherwise. Execution errors surface at the next
// synchronisation.
template <class... Params, class... Args>
void launch(const char* name, void (*kernel)(Params...), const LaunchShape& shape, Device device,
            Args&&... args) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
  const cudaStream_t queue = stream(device);
  // The 48 KiB available without opt-in include the kernel's static shared memory.
  if (shape.shared_bytes > (32u << 10))
    allow_shared_memory(name, reinterpret_cast<const void*>(kernel), shape.shared_bytes, device);
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = queue;
  config.attrs = attributes;
  // Code compiled for older GPUs contains no griddepcontrol.wait.
  if (shape.start == Start::kProgrammatic &&
      fits(reinterpret_cast<const void*>(kernel), {.compute_capability = 90}, device)) {
    cudaLaunchAttribute& programmatic = attributes[config.numAttrs++];
    programmatic.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    programmatic.val.programmaticStreamSerializationAllowed = 1;
  }
  if (const dim3& c = shape.cluster; c.x * c.y * c.z > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {c.x, c.y, c.z};
  }
  nvtxRangePushA(name);
  cudaError_t code = with_memory([&] { return cudaLaunchKernelEx(&config, kernel, args...); });
  nvtxRangePop();
#ifdef COHORT_SPIN_LIMIT
  if (code == cudaSuccess && !::cohort::is_capturing(device)) code = cudaStreamSynchronize(queue);
#endif
  if (code != cudaSuccess) throw_error(code, name, __FILE__, __LINE__);
  record_trigger(queue, shape.start == Start::kProgrammatic ? shape.trigger : Trigger::kLate);
}

// Grid dimension for `n` items at `per_block` per block. Throws Error above the grid limit.
inline unsigned blocks_for(int64_t n, int64_t per_block) {
  const int64_t blocks = (n + per_block - 1) / per_block;
  COHORT_CHECK(blocks <= 0x7fffffff, "[launch] ", n, " items need too large a grid");
  return static_cast<unsigned>(std::max<int64_t>(blocks, 0));
}

}  // namespace cohort::cuda
