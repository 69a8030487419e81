// Recording and starting CUDA graphs. A graph's kernels write to the addresses of its recording, so
// what was allocated meanwhile stays with the graph in a pool of its own.
#include <functional>
#include <memory>

#include "core/allocator.h"
#include "core/cuda.h"
#include "core/cuda_backend.h"

namespace cohort::cuda {
namespace {

struct Graph {
  explicit Graph(Device device, std::shared_ptr<void> pool)
      : device(device), pool(std::move(pool)) {}
  ~Graph() {
    if (executable == nullptr) return;
    cudaStreamSynchronize(static_cast<cudaStream_t>(current_stream(device).handle));
    cudaGraphExecDestroy(executable);
  }
  Device device;
  std::shared_ptr<void> pool;  // what its kernels write to
  cudaGraphExec_t executable = nullptr;
};

std::shared_ptr<Graph> record(Device device, ReplayMemory& memory,
                              const std::function<void()>& work) {
  if (memory.pool == nullptr) memory.pool = std::make_shared<MemoryPool>(device);
  const MemoryPool& pool = *static_cast<MemoryPool*>(memory.pool.get());
  auto graph = std::make_shared<Graph>(device, memory.pool);
  const cudaStream_t queue = stream(device);
  cudaGraph_t recorded = nullptr;
  COHORT_CUDA_CHECK(cudaStreamBeginCapture(queue, cudaStreamCaptureModeThreadLocal));
  try {
    const MemoryPool::Use use(pool);
    work();
  } catch (...) {
    cudaStreamEndCapture(queue, &recorded);
    if (recorded != nullptr) cudaGraphDestroy(recorded);
    cudaGetLastError();
    throw;
  }
  COHORT_CUDA_CHECK(cudaStreamEndCapture(queue, &recorded));
  const int64_t live = pool.live_bytes();
  if (live > 0) cudaGraphDestroy(recorded);
  COHORT_CHECK(live == 0, "[replay] the recorded work has left ", live,
               " bytes, which every later run would write to again");
  const cudaError_t code = cudaGraphInstantiate(&graph->executable, recorded, 0);
  cudaGraphDestroy(recorded);
  COHORT_CUDA_CHECK(code);
  return graph;
}

}  // namespace

bool is_recording(Device device) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  COHORT_CUDA_CHECK(cudaStreamIsCapturing(stream(device), &status));
  return status != cudaStreamCaptureStatusNone;
}

void replay(Device device, std::shared_ptr<void>& graph, ReplayMemory& memory,
            const std::function<void()>& work) {
  if (graph == nullptr) graph = record(device, memory, work);
  COHORT_CUDA_CHECK(cudaGraphLaunch(static_cast<Graph*>(graph.get())->executable, stream(device)));
}

}  // namespace cohort::cuda
