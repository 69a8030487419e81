// Work that overlaps with the current stream of a CUDA device, such as the all-reduce of gradients
// during the backward. Defined in CUDA builds only.
#pragma once

#include <functional>
#include <memory>

#include "core/device.h"

namespace cohort {

class SideStream {
 public:
  virtual ~SideStream() = default;
  // Calls `work` with the side stream as the current stream. Work enqueued there starts after all
  // work now in the caller's stream, and after earlier side work.
  virtual void run(const std::function<void()>& work) = 0;
  // Makes later work on the current stream wait for all side work.
  virtual void wait() = 0;
};

namespace cuda {
std::unique_ptr<SideStream> make_side_stream(Device device);
}

}  // namespace cohort
