#include "core/graph.h"

#include <utility>

#include "core/cuda_backend.h"
#include "core/with_cuda.h"

namespace cohort {
namespace {

void run_eagerly(Device, std::shared_ptr<void>&, GraphMemory&, const std::function<void()>& work) {
  work();
}

}  // namespace

bool is_capturing(Device device) {
  return on_device<[](Device) { return false; }, cuda::is_capturing>(device, device);
}

GraphRunner::GraphRunner(Device device, std::function<void()> work,
                         std::shared_ptr<GraphMemory> memory)
    : device_(device), work_(std::move(work)), memory_(std::move(memory)) {}

void GraphRunner::run() {
  if (++runs_ == 1) return work_();
  on_device<run_eagerly, cuda::launch_graph>(device_, device_, graph_, *memory_, work_);
}

}  // namespace cohort
