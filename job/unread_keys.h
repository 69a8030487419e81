// Keys of a configuration that do nothing, because only other data or another trainer reads them.
#pragma once

#include "job/config.h"

namespace cohort {

// Sets TrainConfig::unread. Keys beside `stages` need not be for all of them.
RunPlan with_unread_keys(RunPlan plan);

}  // namespace cohort
