// Work that is done many times on the same tensors, such as a decode step: recorded once as a CUDA
// graph and then started as a whole, so that its many small kernels cost the host one call.
#pragma once

#include <functional>
#include <memory>

#include "core/device.h"

namespace cohort {

class Replay {
 public:
  // `work` enqueues the same kernels on the same addresses whenever it is called; what it allocates
  // it frees. It must not wait for the device, nor copy from the host.
  Replay(Device device, std::function<void()> work);
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;

  // Does the work. On CUDA the first call runs it as it is, the second records it. On the CPU it is
  // called every time.
  void run();

 private:
  Device device_;
  std::function<void()> work_;
  int64_t runs_ = 0;
  std::shared_ptr<void> graph_;
};

}  // namespace cohort
