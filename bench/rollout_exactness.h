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
Metrics compare_exactness(const Transformer& model, int64_t runs);

}  // namespace cohort::bench
