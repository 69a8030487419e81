// Small steps between decode kernels that keep the sampler's state on the device.
#pragma once

#include "kernels/common.h"

namespace cohort::kernels {

// t += 1 for every element; i32 or i64.
void increment(Tensor& t);

namespace cpu {
void increment(Tensor& t);
}
namespace cuda {
void increment(Tensor& t);
}

}  // namespace cohort::kernels
