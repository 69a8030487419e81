#include "core/replay.h"

#include <utility>

#include "core/cuda_backend.h"
#include "core/with_cuda.h"

namespace cohort {
namespace {

void call_again(Device, std::shared_ptr<void>&, ReplayMemory&, const std::function<void()>& work) {
  work();
}

bool never_records(Device) {
  return false;
}

}  // namespace

bool is_recording(Device device) {
  return on_device<never_records, cuda::is_recording>(device, device);
}

Replay::Replay(Device device, std::function<void()> work, std::shared_ptr<ReplayMemory> memory)
    : device_(device), work_(std::move(work)), memory_(std::move(memory)) {}

void Replay::run() {
  if (++runs_ == 1) return work_();
  on_device<call_again, cuda::replay>(device_, device_, graph_, *memory_, work_);
}

}  // namespace cohort
