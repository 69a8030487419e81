// CUDA part of make_communicator(), and the argument check that CPU and CUDA share.
#pragma once

#include <memory>
#include <string>

#include "distributed/communicator.h"
#include "distributed/process_group.h"

namespace cohort {

// Returns a description of the call, "all_reduce of f32[3]". Throws Error if `t` cannot be reduced.
std::string describe_all_reduce(const Tensor& t, Reduce op);

namespace cuda {
// `host` performs barriers and collectives on CPU tensors. Defined in CUDA builds only.
std::unique_ptr<Communicator> make_nccl_communicator(ProcessGroup& group, Device device,
                                                     std::unique_ptr<Communicator> host);
}  // namespace cuda

}  // namespace cohort
