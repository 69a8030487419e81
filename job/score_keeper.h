// The evaluations of a stage: measures and records them, keeps the best, and warns of a collapse.
#pragma once

#include "job/stage_logs.h"

namespace cohort {

class ScoreKeeper : NonCopyable {
 public:
  // Writes into the state of `start`, and into `logs`; `engine` samples from its model.
  ScoreKeeper(const StageSetup& setup, ModelStart& start, Engine& engine, StageLogs& logs)
      : setup_(setup), start_(start), engine_(engine), logs_(logs) {}
  // The options of dialogues in training and evaluation.
  DialogueOptions dialogue() const {
    return dialogue_options(config_.environment, start_.environment.get());
  }
  // Every rank takes part and has the score; rank 0 writes. Throws EvaluationStopped, having
  // changed nothing, if one of them has been asked to stop.
  void evaluate();
  // True if an evaluation has reached eval.stop_at.
  bool reached() const { return reached_; }

 private:
  Evaluation measure();
  void record(const Evaluation& evaluation);
  void warn_of_collapse(const Evaluation& evaluation);

  const StageSetup& setup_;
  const TrainConfig& config_ = setup_.config;
  ModelStart& start_;
  TrainState& state_ = start_.state;
  Engine& engine_;
  StageLogs& logs_;
  bool reached_ = false, collapsed_ = false, warned_ = false;
};

}  // namespace cohort
