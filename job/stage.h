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

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "core/non_copyable.h"
#include "data/dataset.h"
#include "distributed/communicator.h"
#include "job/checkpoint.h"
#include "job/config.h"
#include "job/event_file.h"
#include "job/log_file.h"
#include "job/report.h"
#include "trainers/grpo_step.h"
#include "trainers/learner.h"

namespace cohort {

struct StageSetup {
  const TrainConfig& config;
  std::string dir;  // metrics.jsonl, completions.jsonl, event files, checkpoints/, trace.json
  Communicator& comm;
  Reporter& reporter;             // used by rank 0 only; its exceptions end the stage
  const std::atomic<bool>& stop;  // set by SIGINT and SIGTERM
  Device device = {};             // this rank's device
  // Resume from a checkpoint before this one; empty: from the newest.
  std::string before = {};
  // Reason why the finished stage cannot be extended; empty: it can.
  std::string fixed = {};
  std::string steps_key = "steps";            // the override that lengthens this stage alone
  int64_t profile_steps = 0;                  // steps to trace, into trace.json
  std::span<const TrainConfig> earlier = {};  // the stages before this one
  // Called by rank 0 when updates have run out of memory and use smaller micro batches from now on.
  std::function<void(int64_t micro_batch_tokens)> record_micro_batch = [](int64_t) {};
  // Replays steps in place of training: nothing is evaluated or written.
  StepJournal* replay = nullptr;
  const std::string* plan = nullptr;  // for the journal of rank 0, see Journal
};

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
  // Loads data and model: from the newest checkpoint in `dir` if there is one (resume), else from
  // init_from, else fresh. Throws InputError on ranks that do not start alike.
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
    return learner_->optimizer().updates() == resumed_updates_ ? resumed_from_ : "";
  }

  int64_t step() const { return state_.step; }
  double learning_rate() const {
    return scheduled_learning_rate(config_.optimizer, state_.step, config_.batch.steps);
  }
  const TrainConfig& config() const { return config_; }
  Communicator& comm() { return comm_; }
  Dataset& data() { return data_; }
  Learner& learner() { return *learner_; }
  Transformer& model() { return learner_->model(); }
  Engine& engine() { return *engine_; }
  // The options of dialogues in training and evaluation.
  DialogueOptions dialogue() const {
    return dialogue_options(config_.environment, environment_.get());
  }
  // The policy that the KL term refers to; without a model unless this is grpo with beta > 0.
  ReferencePolicy reference();
  const Correctness& correct() const { return correct_; }
  TrainState& state() { return state_; }
  // The journal or the replay of this rank's steps (grpo); nullptr: there is none.
  StepJournal* journal();
  // Writes DIR/checkpoints/step-N (rank 0).
  void write_files(const std::string& dir);
  bool is_main() const { return comm_.rank() == 0; }
  // Appends one line, which is JSON, to completions.jsonl (rank 0).
  void log_completion(const std::string& line) {
    if (!completions_) return;
    completions_->write(line);
    reporter_.completion(line);
  }
  // Logs a warning, with the path of the best weights (rank 0).
  void warn(const std::string& warning) const;
  // Called if a step has thrown OutOfMemoryError: saves the last completed step if the weights are
  // still those, and returns a sentence about that for the error's message. Any rank may be alone
  // in this: it makes no collective call.
  std::string save_after_failure();

 private:
  void build_model();
  void make_learner(std::unique_ptr<Transformer> model);
  void set_memory_callbacks();
  LoadedModel load(const std::string& checkpoint) const;
  LoadedModel load_start() const;
  void resume_from(const std::string& checkpoint);
  void check_equal_starts();
  bool evaluate();
  // True if a step has ended whose evaluation is due (eval.every).
  bool evaluation_due() const {
    return state_.step < config_.batch.steps && config_.eval.every > 0 &&
           state_.step % config_.eval.every == 0;
  }
  void save(bool finished);
  void write_trace();
  void log_metrics(const Json& line);
  // True if neither a step nor an evaluation has been made.
  bool is_new() const { return state_.step == 0 && state_.evaluated_step < 0; }
  Evaluation evaluation();
  void load_problems();
  void warn_of_collapse(const Evaluation& evaluation);
  void load_reference(const LoadedModel& loaded);
  void load_reference_adapters(const Transformer& model);
  void move_reference();
  bool is_best(double score, double loss) const;
  double epoch() const;
  void add_update_size(Metrics& metrics, double rate);
  void watch_streaming(const Metrics& metrics);
  void record_score(const Evaluation& evaluation);
  void report_score(const Evaluation& evaluation);

  const StageSetup setup_;
  const TrainConfig& config_ = setup_.config;
  const std::string& dir_ = setup_.dir;
  Communicator& comm_ = setup_.comm;
  Reporter& reporter_ = setup_.reporter;
  const Device device_ = setup_.device;
  Dataset data_;
  std::unique_ptr<Learner> learner_;
  std::unique_ptr<Engine> engine_;  // samples from the learner's model
  std::unique_ptr<Environment> environment_;
  std::unique_ptr<Transformer> reference_;  // unless the model has adapters
  std::vector<Tensor> start_adapters_;      // reference: start, moved by ref_sync_every
  Correctness correct_;
  std::vector<EvalSet> sets_;  // eval.sets
  TrainState state_;
  std::unique_ptr<Journal> journal_;
  std::optional<LogFile> metrics_, completions_;  // rank 0 only, of training
  std::optional<EventFile> events_;
  std::string resumed_from_;     // a checkpoint; empty: a new stage
  int64_t resumed_updates_ = 0;  // updates made before it
  int64_t first_step_ = 0;       // where this process began
  int64_t saved_step_ = -1;
  int64_t pinned_ = 0;  // bytes of optimizer state in page-locked memory
  bool interrupted_ = false, reached_ = false, warned_ = false, collapsed_ = false;
  int64_t tiny_updates_ = 0;     // steps in a row whose relative update is too small; -1: reported
  std::vector<double> weights_;  // Optimizer::sample_weights() before a step whose size is measured
  std::chrono::steady_clock::time_point saved_at_ = std::chrono::steady_clock::now();
  Stopwatch step_watch_;
  int64_t trace_begin_ = -1, trace_end_ = -1;  // steps
  std::optional<Trace> trace_;                 // trace in progress
};

// The training loops. Each runs one stage on one rank; all ranks of a run call it.
// Next-token training on text (pretrain) or on prompt and solution pairs (sft).
StageEnd train_supervised(Stage& stage);
// Sampling-based rollouts and GRPO updates on the same weights.
StageEnd train_grpo(Stage& stage);

}  // namespace cohort
