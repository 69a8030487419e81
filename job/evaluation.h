// Scores of a trained model on what the configuration of a run holds out.
#pragma once

#include <atomic>
#include <span>
#include <string>
#include <vector>

#include "job/checkpoint.h"
#include "job/config.h"

namespace cohort {

struct ModelScores {
  Json metrics;                    // by name, NaN as null; the criterion of pass@1 as "correct"
  std::string measure;             // the criterion's reward; empty: text was evaluated
  std::vector<Example> problems;   // the held-out ones
  std::vector<double> pass_rates;  // as ProblemScores has them
};
// Evaluates `loaded` by the last stage of `plan` and its sets: "val_loss" on text, else
// evaluate_problems(). `stop` becomes true to end it with EvaluationStopped; may be null. Throws
// InputError if nothing is held out, and Error if nothing can be judged.
ModelScores evaluate_model(const RunPlan& plan, const LoadedModel& loaded,
                           const std::atomic<bool>* stop = nullptr);

// Log-probs of the tokens of each sequence after its first, [T - 1] for T tokens, computed in
// batches. T is from 2 to the model's context + 1.
std::vector<Tensor> token_logprobs(const Transformer& model,
                                   std::span<const std::vector<int32_t>> sequences,
                                   double temperature);

}  // namespace cohort
