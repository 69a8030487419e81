// An update without GPUs or elements: the collectives of a rank among others.
#pragma once

#include "trainers/learner.h"

namespace cohort {

// One Learner::update() of a model on `device` in a dry run (core/dry_run.h), with the calls that a
// rank makes for as many micro batches. The device and the other ranks need not exist: the numbers
// of losses and gradients count as finite, and comm, a DryCommunicator, keeps its own numbers.
void dry_update(const ModelConfig& model, DType dtype, Device device, const OptimizerConfig& config,
                int64_t micro_batches, Communicator& comm);

}  // namespace cohort
