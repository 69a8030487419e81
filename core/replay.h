// Work that is done many times on the same tensors, such as a decode step: recorded once as a CUDA
// graph and then started as a whole, so that its many small kernels cost the host one call.
#pragma once

#include <functional>
#include <memory>

#include "core/device.h"

namespace cohort {

// True while this thread's work on `device` is being recorded: then nothing can be waited for.
bool is_recording(Device device);

// What works allocate while they are recorded. Those that never run at the same time may share it.
struct ReplayMemory {
  std::shared_ptr<void> pool;  // made by the first recording
};

class Replay {
 public:
  // `work` enqueues the same kernels on the same addresses whenever it is called; what it allocates
  // it frees. It must not wait for the device, nor copy from the host.
  Replay(Device device, std::function<void()> work,
         std::shared_ptr<ReplayMemory> memory = std::make_shared<ReplayMemory>());
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;

  // Does the work. On CUDA the first call runs it as it is, the second records it. On the CPU it is
  // called every time.
  void run();

 private:
  Device device_;
  std::function<void()> work_;
  std::shared_ptr<ReplayMemory> memory_;
  int64_t runs_ = 0;
  std::shared_ptr<void> graph_;
};

}  // namespace cohort
