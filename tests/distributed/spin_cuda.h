// A kernel that does not end by itself, as one that hangs.
#pragma once

#include "core/device.h"

namespace cohort::test {

// Enqueues a kernel on the current stream that ends once *flag, in host memory that the device can
// read, is not 0, and after 60 seconds at the latest.
void enqueue_spin(const volatile int* flag, Device device);

}  // namespace cohort::test
