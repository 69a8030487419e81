// The one place that starts kernels: `<<<>>>`, the error check and the range that a profiler shows.
//
//   cuda::launch("rms_norm", rms_norm_kernel<float>, {rows, 256}, x.device(), px, pw, py);
#pragma once

#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <utility>

#include "core/cuda.h"

namespace cohort::cuda {

struct LaunchShape {
  dim3 grid, block;
  size_t shared_bytes = 0;  // dynamic shared memory; over 48 KiB is asked for as needed
};

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
  nvtxRangePushA(name);
  kernel<<<shape.grid, shape.block, shape.shared_bytes, queue>>>(std::forward<Args>(args)...);
  nvtxRangePop();
  if (const cudaError_t code = cudaGetLastError(); code != cudaSuccess)
    throw_error(code, name, __FILE__, __LINE__);
}

// Blocks for `n` items at `per_block` each, as a grid dimension. Throws Error past its limit.
inline unsigned blocks_for(int64_t n, int64_t per_block) {
  const int64_t blocks = (n + per_block - 1) / per_block;
  COHORT_CHECK(blocks <= 0x7fffffff, "[launch] ", n, " items need too large a grid");
  return static_cast<unsigned>(std::max<int64_t>(blocks, 0));
}

}  // namespace cohort::cuda
