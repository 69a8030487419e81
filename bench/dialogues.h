// Dialogues with tools that take time, for cohort_bench_grpo.
#pragma once

#include "nn/transformer.h"
#include "trainers/metrics.h"

namespace cohort::bench {

// 64 prompts of 128 tokens, 8 completions each, in turn: 256 tokens in one turn, and 296; 256 in 3
// turns of random lengths, with 2 observations of 20 tokens between them, each `tool_seconds` after
// its turn has ended; the same in 3 turns of equal lengths, so that all dialogues wait at once.
// Medians of `repeats` rounds, after one that warms up. The ratios are to 256 tokens in one turn,
// and (all_tokens) to 296.
Metrics time_dialogues(const Transformer& model, double tool_seconds, int64_t repeats);

}  // namespace cohort::bench
