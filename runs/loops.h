// The training loops. Each runs one stage on one rank; all ranks of a run call it.
#pragma once

#include "runs/stage.h"

namespace cohort {

// Next-token training on text (pretrain) or on prompt and solution pairs (sft).
StageEnd train_supervised(Stage& stage);
// Sampling-based rollouts and GRPO updates on the same weights.
StageEnd train_grpo(Stage& stage);

}  // namespace cohort
