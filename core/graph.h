// CUDA graphs for work that is repeated on the same tensors, such as a decode step: captured once
// and then replayed with a single launch, whatever the number of its kernels.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "core/device.h"
#include "core/non_copyable.h"

namespace cohort {

// True while this thread's work on `device` is being captured: synchronization is then invalid.
bool is_capturing(Device device);

// Memory allocated during capture. Graphs that never run concurrently may share one.
struct GraphMemory {
  std::shared_ptr<void> pool;  // created by the first capture
};

class GraphRunner : NonCopyable {
 public:
  // Each call of `work` must enqueue the same kernels on the same addresses and free all that it
  // allocates. It must neither synchronize with the device nor copy from the host.
  GraphRunner(Device device, std::function<void()> work,
              std::shared_ptr<GraphMemory> memory = std::make_shared<GraphMemory>())
      : device_(device), work_(std::move(work)), memory_(std::move(memory)) {}

  // On CUDA the first call runs the work eagerly, the second captures it, and every call from the
  // second on launches the graph. On the CPU every call runs the work.
  void run();

 private:
  Device device_;
  std::function<void()> work_;
  std::shared_ptr<GraphMemory> memory_;
  int64_t runs_ = 0;
  std::shared_ptr<void> graph_;
};

}  // namespace cohort
