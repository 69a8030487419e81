// The files that a stage writes as it goes (rank 0): metrics.jsonl, completions.jsonl, event files,
// trace.json; its warnings, and its messages to the Reporter.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "job/event_file.h"
#include "job/log_file.h"
#include "job/model_start.h"

namespace cohort {

class StageLogs : NonCopyable {
 public:
  // Continues the files after the state of `start`. Other ranks than 0, and replays, have none, and
  // write nothing; other ranks help to measure a sharded optimizer's steps.
  StageLogs(const StageSetup& setup, ModelStart& start);
  // Around a step: traces it if that is due, and every few steps measures how the weights change,
  // for which every rank calls both.
  void begin_step();
  // `metrics` of the step that is now the state's, which took `seconds`.
  void end_step(Metrics metrics, double learning_rate, double seconds);
  void evaluation(const Evaluation& evaluation);
  // Appends one line, which is JSON, to completions.jsonl.
  void completion(const std::string& line);
  // Logs a warning, with the path of the best weights.
  void warn(const std::string& warning) const;
  // Writes the trace of steps that is in progress, if there is one.
  void end_trace();
  // Throws Error if log lines were lost.
  void finish();

 private:
  void write(const Json& line);
  bool measures() const;
  void add_update_size(Metrics& metrics, double learning_rate);

  const StageSetup& setup_;
  ModelStart& start_;
  const TrainState& state_ = start_.state;
  const bool writes_ = setup_.is_main() && setup_.replay == nullptr;
  std::optional<LogFile> metrics_, completions_;
  std::optional<EventFile> events_;
  int64_t steps_ = 0;            // made by this process
  int64_t tiny_updates_ = 0;     // steps in a row whose relative update is too small; -1: reported
  bool measured_ = false;        // the size of the present step
  std::vector<double> weights_;  // Optimizer::sample_weights() before a step whose size is measured
  int64_t trace_begin_ = -1, trace_end_ = -1;  // steps
  std::optional<Trace> trace_;                 // trace in progress
};

}  // namespace cohort
