// Evaluation on held-out data, during and after training.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "rl/evaluate.h"
#include "trainers/dataset.h"
#include "trainers/reporter.h"

namespace cohort {

// Which completions are right: the task's checker for generated problems, else the reward with the
// largest weight, else an exact match with the answer.
RewardFn correctness_of(const TrainConfig& config, const Task* task);

struct ProblemResult {
  std::string prompt, answer, completion;
  bool correct = false;
};
struct ProblemScores {
  Metrics metrics;  // "pass@1" (greedy) first, then the sampled "pass@k"
  std::vector<ProblemResult> greedy;
};
// Greedy completions of every problem, and config.eval.num_samples samples of each for pass@k,
// addressed by (seed, step).
ProblemScores evaluate_problems(const Transformer& model, const Tokenizer& tokenizer,
                                std::span<const Example> problems, const RewardFn& correct,
                                const TrainConfig& config, int64_t step);

// Mean next-token loss over a whole token stream in consecutive windows of the model's context.
double evaluate_text(const Transformer& model, std::span<const int32_t> tokens,
                     int64_t micro_batch_tokens);

}  // namespace cohort
