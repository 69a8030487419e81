// Checks at the start of a stage: remaining work of a saved stage, equal state on all ranks.
#pragma once

#include <string>
#include <vector>

#include "data/safetensors.h"
#include "distributed/communicator.h"
#include "runs/checkpoint.h"

namespace cohort {

// Reason why a stage that was saved as finished has nothing left to do under `config`: its steps
// are done, or its last score reached eval.stop_at. "" if it has steps left.
std::string why_finished(const TrainConfig& config, const TrainState& state);

// The planned steps of a saved stage if they are known and differ from those of `config`; else 0.
int64_t other_plan(const TrainConfig& config, const TrainState& state);

// Checksum over tensor names and contents.
uint64_t checksum_of(const NamedTensors& tensors);

// State that must be equal on all ranks.
struct RankPart {
  const char* name;
  uint64_t checksum;
};
// Throws InputError on every rank, naming a rank and the first part in which it differs from rank
// 0.
void check_equal_ranks(Communicator& comm, const std::vector<RankPart>& parts);

}  // namespace cohort
