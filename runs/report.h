// Presentation of an evaluation: on the terminal, in the logs of a stage and in its final report.
#pragma once

#include <string>
#include <vector>

#include "trainers/evaluate.h"

namespace cohort {

struct Evaluation {
  int64_t step = 0;
  double score = 0;     // higher is better; NaN: not measured
  std::string measure;  // name of the score: "pass@1 (countdown)", "validation loss"
  std::string rule;     // criterion: "countdown >= 1"; empty for text
  double seconds = 0;   // duration
  Metrics metrics;      // the score's metric first; empty: nothing is held out
  std::vector<ProblemResult> samples;
};

// "step 20: pass@1 (countdown) 0.5300, sampled_pass@8 0.6000, standard error 0.0221 (512 problems,
// mean length 17.3, 2 % truncated)".
std::string evaluation_text(const Evaluation& evaluation);
// A number of an evaluation as written to files: counts are integers.
Json metric_json(const std::string& name, double value);
// Lines of metrics.jsonl and completions.jsonl.
Json evaluation_json(const Evaluation& evaluation);
Json sample_json(const Evaluation& evaluation, const ProblemResult& problem);
// The part of it that the final report needs.
Json score_json(const Evaluation& evaluation);

// The reward curve, scores and completions before and after, from TrainState::report.
std::string final_report(const Json& report);

// "0.53", or "not measured" for NaN.
std::string score_text(double score, int digits);

}  // namespace cohort
