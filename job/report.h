// The progress of a run for its user, and the presentation of an evaluation: on the terminal, in
// the logs of a stage and in its final report. Trainers report, the command line tool prints
// (apps/console.cpp).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "trainers/evaluate.h"

namespace cohort {

class Reporter {
 public:
  virtual ~Reporter() = default;
  virtual void begin_stage(const std::string& /*name*/, int64_t /*step*/, int64_t /*steps*/) {}
  // Called after each step with its metrics.
  virtual void step(int64_t /*step*/, const Metrics& /*metrics*/) {}
  // Called with each line of completions.jsonl: those of a step before step(), and of evaluations.
  virtual void completion(const std::string& /*json*/) {}
  // A line of its own: an evaluation, a checkpoint, a report.
  virtual void message(const std::string& /*text*/) {}
  virtual void end_stage() {}
};

inline constexpr const char *kValidationLoss = "validation loss", *kAccuracy = "accuracy";

// The scores on one set of eval.sets, or on the held-out part.
struct SetScores {
  std::string name = "";     // empty: the held-out part
  std::string measure = "";  // name of the score: "pass@1 (countdown)", "aime/pass@1 (math)"
  Metrics metrics = {};  // without the set's name; the score's first; empty: there is no problem
  std::vector<ProblemResult> samples = {};
};

// The held-out part, and all sets.
struct Evaluation : SetScores {
  int64_t step = 0;
  double score = 0;    // higher is better; NaN: not measured
  std::string rule;    // criterion: "countdown >= 1"; empty for text
  double seconds = 0;  // duration
  std::vector<SetScores> sets;
  // The set whose score chooses the best step (eval.best); -1: the score above does.
  int64_t best_set = -1;
  double best_score() const { return best_set < 0 ? score : best().metrics.front().second; }
  // The scores with the one that chooses the best step.
  const SetScores& best() const {
    return best_set < 0 ? *this : sets[static_cast<size_t>(best_set)];
  }
  bool empty() const { return metrics.empty() && sets.empty(); }
  // failed_count() of all parts: with any, the scores are those of a part of the problems.
  double failed() const {
    double sum = failed_count(metrics);
    for (const SetScores& set : sets) sum += failed_count(set.metrics);
    return sum;
  }
};

// "step 20: pass@1 (countdown) 0.5300, sampled_pass@8 0.6000, standard error 0.0221 (512 problems,
// mean length 17.3, 2 % truncated)".
std::string evaluation_text(int64_t step, const SetScores& scores);
// Sets the metrics of an evaluation, or of a set of it, as files have them: counts are integers.
void set_metrics(Json& line, const Metrics& metrics, const std::string& set = "");
// A line of metrics.jsonl.
Json evaluation_json(const Evaluation& evaluation);
// The lines of completions.jsonl: of the held-out problems, then of each set, which they name.
std::vector<Json> sample_lines(const Evaluation& evaluation);
// The part of it that the final report needs.
Json score_json(const Evaluation& evaluation);

// The last score of TrainState::report; NaN: not measured, or by an evaluation with failures.
double last_score(const Json& report);

// The reward curve, scores and completions before and after, from TrainState::report.
std::string final_report(const Json& report);

// A curve as text, `height` lines high, for the terminal.
std::string text_curve(const std::vector<double>& values, int width, int height);

// "0.53", or "not measured" for NaN.
std::string score_text(double score, int digits);

}  // namespace cohort
