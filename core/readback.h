// Asynchronous copy of a tensor to the host: enqueued on construction and waited for later, once
// further work has been enqueued behind it.
#pragma once

#include <memory>
#include <vector>

#include "core/tensor.h"

namespace cohort {

class Readback {
 public:
  // Enqueues the copy of a contiguous tensor on the current stream of its device; later work on
  // that stream may overwrite the tensor. On the CPU the copy is made immediately.
  explicit Readback(const Tensor& t);

  // Waits for the copy and returns the elements in row-major order, converted to T.
  template <class T>
  std::vector<T> wait() {
    return on_host().to_vector<T>();
  }

 private:
  const Tensor& on_host();

  Tensor host_;
  std::shared_ptr<void> copy_;  // in flight; null on the CPU
};

}  // namespace cohort
