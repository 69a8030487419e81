// A kernel that waits at a barrier at which nothing arrives, compiled with COHORT_SPIN_LIMIT.
#pragma once

#include "core/device.h"

namespace cohort::test {

// Launches it. Throws Error when the kernel has trapped.
void wait_at_a_barrier_forever(Device device);

}  // namespace cohort::test
