// Recording and starting CUDA graphs. A graph's kernels write to the addresses of its recording, so
// what was allocated meanwhile stays with the graph in a pool of its own.
#include <functional>
#include <memory>

#include "core/allocator.h"
#include "core/cuda.h"

namespace cohort::cuda {
namespace {

struct Graph {
  explicit Graph(Device device) : device(device), pool(device) {}
  ~Graph() {
    if (executable == nullptr) return;
    cudaStreamSynchronize(static_cast<cudaStream_t>(current_stream(device).handle));
    cudaGraphExecDestroy(executable);
  }
  Device device;
  MemoryPool pool;
  cudaGraphExec_t executable = nullptr;
};

}  // namespace

std::shared_ptr<void> record_graph(Device device, const std::function<void()>& work) {
  auto graph = std::make_shared<Graph>(device);
  const cudaStream_t queue = stream(device);
  cudaGraph_t recorded = nullptr;
  COHORT_CUDA_CHECK(cudaStreamBeginCapture(queue, cudaStreamCaptureModeThreadLocal));
  try {
    const MemoryPool::Use use(graph->pool);
    work();
  } catch (...) {
    cudaStreamEndCapture(queue, &recorded);
    if (recorded != nullptr) cudaGraphDestroy(recorded);
    cudaGetLastError();
    throw;
  }
  COHORT_CUDA_CHECK(cudaStreamEndCapture(queue, &recorded));
  const cudaError_t code = cudaGraphInstantiate(&graph->executable, recorded, 0);
  cudaGraphDestroy(recorded);
  COHORT_CUDA_CHECK(code);
  return graph;
}

void launch_graph(void* graph, Device device) {
  COHORT_CUDA_CHECK(cudaGraphLaunch(static_cast<Graph*>(graph)->executable, stream(device)));
}

}  // namespace cohort::cuda
