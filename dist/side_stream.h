// Work beside the current stream of a CUDA device: a gradient is summed over the ranks while the
// backward goes on. Defined in CUDA builds only.
#pragma once

#include <functional>
#include <memory>

#include "core/device.h"

namespace cohort {

class SideStream {
 public:
  virtual ~SideStream() = default;
  // Calls `work` with the side stream as the current one. What it enqueues starts after all that is
  // in the caller's stream by now, and after earlier work.
  virtual void run(const std::function<void()>& work) = 0;
  // What is enqueued on the current stream from now on starts after all work.
  virtual void wait() = 0;
};

namespace cuda {
std::unique_ptr<SideStream> make_side_stream(Device device);
}

}  // namespace cohort
