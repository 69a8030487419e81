// The CUDA half of make_communicator(). Defined in CUDA builds only.
#pragma once

#include <memory>

#include "dist/communicator.h"
#include "dist/process_group.h"

namespace cohort::cuda {

// `host` does the collectives of CPU tensors, and barriers.
std::unique_ptr<Communicator> make_nccl_communicator(ProcessGroup& group, Device device,
                                                     std::unique_ptr<Communicator> host);

}  // namespace cohort::cuda
