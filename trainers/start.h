// The start of a stage: whether one that was saved has anything left to do, and whether all ranks
// start from the same.
#pragma once

#include <string>
#include <vector>

#include "data/safetensors.h"
#include "dist/communicator.h"
#include "trainers/checkpoint.h"

namespace cohort {

// Why a stage that was saved as finished has nothing left to do under `config`: its steps are done,
// or its last score reached eval.stop_at. "" if it has.
std::string why_finished(const TrainConfig& config, const TrainState& state);

// The steps a saved stage was planned for, if they are known and other than those of `config`;
// else 0.
int64_t other_plan(const TrainConfig& config, const TrainState& state);

// Of names and bytes, wherever the tensors are.
uint64_t checksum_of(const NamedTensors& tensors);

// Something that every rank must have the same of.
struct RankPart {
  const char* what;
  uint64_t checksum;
};
// Throws InputError on every rank, naming a rank that has something else than rank 0 and what.
void check_equal_ranks(Communicator& comm, const std::vector<RankPart>& parts);

}  // namespace cohort
