// Work that overlaps with the current stream of a CUDA device, such as sums of gradients during the
// backward.
#pragma once

#include <functional>
#include <memory>

#include "core/device.h"

namespace cohort {

// This class is that of the CPU, where the work is complete when its call returns.
class SideStream {
 public:
  virtual ~SideStream() = default;
  // Calls `work` with the side stream as the current stream. Work enqueued there starts after all
  // work now in the caller's stream, and after earlier side work.
  virtual void run(const std::function<void()>& work) { work(); }
  // Makes later work on the current stream wait for all side work.
  virtual void wait() {}
};

namespace cuda {
// Defined in CUDA builds only.
std::unique_ptr<SideStream> make_side_stream(Device device);
}  // namespace cuda

}  // namespace cohort
