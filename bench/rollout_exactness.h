// Exactness of the rollout engine on a model of real size, for cohort_bench_grpo.
#pragma once

#include "nn/transformer.h"
#include "trainers/metrics.h"

namespace cohort::bench {

// Samples completions of shared prompts of odd lengths, some with more keys than one and two of
// attention's chunks (4,096). Each of `runs` runs uses one of several engine configurations, some
// with caches that are too small for all requests. Counts bitwise differences:
//   different       log-probs of the first run against those of packed training forwards
//   runs_different  tokens and log-probs of the other runs against those of the first
// With `turns`, completions are dialogues of 1 to 8 turns, with observations of 1 to 700 tokens
// whose delays differ from run to run.
Metrics compare_exactness(const Transformer& model, int64_t runs, bool turns = false);

}  // namespace cohort::bench
