// Capture and launch of CUDA graphs. A graph's kernels write to the addresses of its capture, so
// memory allocated during the capture stays reserved for the graph in a separate pool.
#include <functional>
#include <memory>

#include "core/allocator.h"
#include "core/cuda.h"
#include "core/cuda_backend.h"

namespace cohort::cuda {
namespace {

struct Graph {
  ~Graph() {
    if (executable == nullptr) return;
    cudaStreamSynchronize(static_cast<cudaStream_t>(current_stream(device).handle));
    cudaGraphExecDestroy(executable);
  }
  Device device;
  std::shared_ptr<void> pool;  // memory that its kernels write to
  cudaGraphExec_t executable = nullptr;
};

std::shared_ptr<Graph> capture(Device device, GraphMemory& memory,
                               const std::function<void()>& work) {
  if (memory.pool == nullptr) memory.pool = std::make_shared<MemoryPool>(device);
  const MemoryPool& pool = *static_cast<MemoryPool*>(memory.pool.get());
  auto graph = std::make_shared<Graph>(device, memory.pool);
  const cudaStream_t queue = stream(device);
  cudaGraph_t captured = nullptr;
  COHORT_CUDA_CHECK(
      with_memory([&] { return cudaStreamBeginCapture(queue, cudaStreamCaptureModeThreadLocal); }));
  try {
    const StreamGuard use(pool.stream());
    work();
  } catch (...) {
    cudaStreamEndCapture(queue, &captured);
    if (captured != nullptr) cudaGraphDestroy(captured);
    cudaGetLastError();
    throw;
  }
  COHORT_CUDA_CHECK(cudaStreamEndCapture(queue, &captured));
  const int64_t live = pool.live_bytes();
  if (live > 0) cudaGraphDestroy(captured);
  COHORT_CHECK(live == 0, "[graph] the captured work left ", live,
               " bytes allocated, which every replay would overwrite");
  const cudaError_t code =
      with_memory([&] { return cudaGraphInstantiate(&graph->executable, captured, 0); });
  cudaGraphDestroy(captured);
  if (code != cudaSuccess) throw_error(code, "cudaGraphInstantiate", __FILE__, __LINE__);
  return graph;
}

}  // namespace

bool is_capturing(Device device) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  COHORT_CUDA_CHECK(cudaStreamIsCapturing(stream(device), &status));
  return status != cudaStreamCaptureStatusNone;
}

void launch_graph(Device device, std::shared_ptr<void>& graph, GraphMemory& memory,
                  const std::function<void()>& work) {
  if (graph == nullptr) graph = capture(device, memory, work);
  const cudaGraphExec_t executable = static_cast<Graph*>(graph.get())->executable;
  const cudaStream_t queue = stream(device);
  COHORT_CUDA_CHECK(with_memory([&] { return cudaGraphLaunch(executable, queue); }));
}

}  // namespace cohort::cuda
