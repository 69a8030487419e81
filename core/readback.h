// A tensor's elements on their way to the host, without waiting for the device: the copy is
// enqueued now and looked at later, when other work has been enqueued behind it.
#pragma once

#include <memory>
#include <vector>

#include "core/tensor.h"

namespace cohort {

class Readback {
 public:
  // Enqueues the copy of a contiguous tensor on the current stream of its device; later work there
  // may write to the tensor. On the CPU it is copied at once.
  explicit Readback(const Tensor& t);

  // The elements in row-major order, converted to T, once they are there.
  template <class T>
  std::vector<T> wait() {
    return on_host().to_vector<T>();
  }

 private:
  const Tensor& on_host();

  Tensor host_;
  std::shared_ptr<void> copy_;  // under way, of a CUDA tensor
};

}  // namespace cohort
