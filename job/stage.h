// Everything around the training step that pretraining, SFT and GRPO have in common: model loading,
// evaluation, metrics, checkpoints, resume and interrupts. A training loop reads
//
//   Stage stage(setup);
//   while (stage.more()) {
//     ... stage.learner().update(...) ...
//     stage.end_step(metrics);
//   }
//   return stage.finish();
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "job/score_keeper.h"

namespace cohort {

class Journal;
enum class StageEnd { kFinished, kInterrupted };

// Progress of this process's run, for handlers of signals: a request to stop finds nothing that a
// resume would miss, a step in progress, an evaluation after one, or a stage that was saved last.
enum class RunProgress { kNothingToSave, kStep, kEvaluation, kSaved };
RunProgress run_progress();  // async-signal-safe

// watchdog_minutes of this process's run, for ProcessGroup::Options; 10 before it has any.
std::chrono::milliseconds watchdog_limit();
void set_watchdog(const TrainConfig& config);

class Stage : NonCopyable {
 public:
  // Loads data and model, as ModelStart does, and throws as it does.
  explicit Stage(const StageSetup& setup);
  ~Stage();

  // Returns true if there is another step. Evaluates before the first (eval.at_start), makes up for
  // an evaluation that was stopped before a resume, and saves if checkpoint.every_minutes have
  // passed.
  bool more();
  // Ends step step(): counts it, writes metrics (rank 0), evaluates and saves if due. A new
  // best is saved at once.
  void end_step(const Metrics& metrics);
  // Last evaluation, checkpoint and report. A request to stop ends the evaluation, and the stage
  // as interrupted. Then throws Error if log lines were lost.
  StageEnd finish();
  // True on every rank if one has been asked to stop.
  bool stop_requested();

  // True if the stage was saved as finished and has nothing left to do.
  bool finished() const { return state_.finished; }
  // The checkpoint that the stage was resumed from if no update has been made since; else "".
  std::string untried_checkpoint() const {
    return start_.learner->optimizer().updates() == resumed_updates_ ? start_.checkpoint : "";
  }

  int64_t step() const { return state_.step; }
  double learning_rate() const {
    return scheduled_learning_rate(config_.optimizer, state_.step, config_.batch.steps);
  }
  const TrainConfig& config() const { return config_; }
  Communicator& comm() { return setup_.comm; }
  Dataset& data() { return start_.data; }
  Learner& learner() { return *start_.learner; }
  Transformer& model() { return learner().model(); }
  Engine& engine() { return engine_; }
  DialogueOptions dialogue() const { return scores_.dialogue(); }
  ReferencePolicy reference() const { return start_.reference->policy(); }
  const PairReferences& pair_references() const { return start_.pair_references; }
  const Correctness& correct() const { return start_.correct; }
  TrainState& state() { return state_; }
  // The journal or the replay of this rank's steps (grpo); nullptr: there is none.
  StepJournal* journal();
  // Writes DIR/checkpoints/step-N (rank 0).
  void write_files(const std::string& dir);
  bool is_main() const { return setup_.is_main(); }
  void log_completion(const std::string& line) { logs_.completion(line); }
  void warn(const std::string& warning) const { logs_.warn(warning); }
  // Called if a step has thrown OutOfMemoryError, or a function of the training program has
  // thrown: saves the last completed step if the weights are still those, and returns a sentence
  // about that for the error's message. Any rank may be alone in this: it makes no collective call.
  std::string save_after_failure();

 private:
  bool evaluate();
  void remember_step();
  void save(bool finished);
  void check_equal_weights();
  // True if a step has ended whose evaluation is due (eval.every).
  bool evaluation_due() const {
    return state_.step < config_.batch.steps && config_.eval.every > 0 &&
           state_.step % config_.eval.every == 0;
  }
  bool is_over() const {
    return state_.step >= config_.batch.steps || scores_.reached() || state_.finished;
  }

  const StageSetup setup_;
  const TrainConfig& config_ = setup_.config;
  ModelStart start_{setup_};
  TrainState& state_ = start_.state;
  TrainState complete_;  // the last completed step, without its report
  Engine engine_{start_.learner->model(), config_.rollout};
  StageLogs logs_{setup_, start_};
  ScoreKeeper scores_{setup_, start_, engine_, logs_};
  std::unique_ptr<Journal> journal_;
  const int64_t resumed_updates_ = state_.updates;  // made before this process began
  int64_t saved_step_ = start_.checkpoint.empty() ? -1 : state_.step;
  bool interrupted_ = false;
  std::chrono::steady_clock::time_point saved_at_ = std::chrono::steady_clock::now();
  Stopwatch step_watch_;
};

// The training loops. Each runs one stage on one rank; all ranks of a run call it.
// Next-token training on text (pretrain) or on prompt and solution pairs (sft), and updates on
// preference pairs (dpo).
StageEnd train_supervised(Stage& stage);
// Sampling-based rollouts and GRPO updates on the same weights.
StageEnd train_grpo(Stage& stage);

}  // namespace cohort
