// The CUDA half of make_communicator(), and what both halves check and say.
#pragma once

#include <memory>
#include <string>

#include "dist/communicator.h"
#include "dist/process_group.h"

namespace cohort {

// Throws if `t` cannot be reduced. What the call is: "all_reduce of f32[3]".
std::string describe_all_reduce(const Tensor& t, Reduce op);

namespace cuda {
// `host` does the collectives of CPU tensors, and barriers. Defined in CUDA builds only.
std::unique_ptr<Communicator> make_nccl_communicator(ProcessGroup& group, Device device,
                                                     std::unique_ptr<Communicator> host);
}  // namespace cuda

}  // namespace cohort
