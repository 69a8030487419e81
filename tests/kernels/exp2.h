// The exponential of the attention kernels, whose bits are those of an instruction.
#pragma once

#include <vector>

#include "core/tensor.h"

namespace cohort::test {

std::vector<float> exp2_on(const std::vector<float>& x, Device device);

}  // namespace cohort::test
