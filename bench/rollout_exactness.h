// What cohort_bench_grpo finds of the engine's exactness, on a model of real size.
#pragma once

#include "nn/transformer.h"
#include "trainers/metrics.h"

namespace cohort::bench {

// Draws completions of prompts that several of them share, of odd lengths, some with more keys than
// one and two of attention's chunks (4,096), `runs` times by engines of several sizes in turn: some
// have caches that are too small for all. Compared bit for bit:
//   different       log-probs of the first run with those of packed training forwards
//   runs_different  tokens and log-probs of the other runs with those of the first
Metrics compare_exactness(const Transformer& model, int64_t runs);

}  // namespace cohort::bench
