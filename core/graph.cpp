#include "core/graph.h"

#include "core/cuda_backend.h"
#include "core/with_cuda.h"

namespace cohort {

bool is_capturing(Device device) {
  return on_device<[](Device) { return false; }, cuda::is_capturing>(device, device);
}

void GraphRunner::run() {
  if (++runs_ == 1) return work_();
  on_device<[](Device, auto&, GraphMemory&, const auto& work) { work(); }, cuda::launch_graph>(
      device_, device_, graph_, *memory_, work_);
}

}  // namespace cohort
