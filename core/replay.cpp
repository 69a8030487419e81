#include "core/replay.h"

#include <utility>

#include "core/with_cuda.h"

namespace cohort {
namespace cuda {
std::shared_ptr<void> record_graph(Device device, const std::function<void()>& work);
void launch_graph(void* graph, Device device);
}  // namespace cuda

Replay::Replay(Device device, std::function<void()> work)
    : device_(device), work_(std::move(work)) {}

void Replay::run() {
  if constexpr (kWithCuda) {
    if (device_.is_cuda() && ++runs_ > 1) {
      if (graph_ == nullptr) graph_ = cuda::record_graph(device_, work_);
      return cuda::launch_graph(graph_.get(), device_);
    }
  }
  work_();
}

}  // namespace cohort
