// Dialogues with tools that take time, for cohort_bench_grpo.
#pragma once

#include "nn/transformer.h"
#include "trainers/metrics.h"

namespace cohort::bench {

// 64 prompts of 128 tokens, 8 completions each, in turn: 256 tokens in one turn; the same number in
// 3 turns of random lengths with observations of 20 tokens, each `tool_seconds` after its turn has
// ended; the same in 3 turns of equal lengths, so that all dialogues wait at once. Medians of
// `repeats` rounds, after one that warms up.
Metrics time_dialogues(const Transformer& model, double tool_seconds, int64_t repeats);

}  // namespace cohort::bench
