// The bytes that ranks send in an update.
#pragma once

#include "job/memory_plan.h"

namespace cohort {

// Bytes that each rank sends to others in an update: counted in the calls of a dry one.
struct UpdateTraffic {
  int64_t gradients = 0, weights = 0;
  int64_t exchanges = 0;  // calls that exchange a few numbers in the memory of hosts
};
// `stage`: with the model as `config` trains it.
UpdateTraffic update_traffic(const TrainConfig& config, const StagePreview& stage, int64_t ranks);

}  // namespace cohort
