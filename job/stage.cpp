#include "job/stage.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/allocator.h"
#include "core/log.h"
#include "core/progress.h"
#include "core/sizes.h"
#include "job/journal.h"
#include "trainers/across_ranks.h"

namespace cohort {
namespace {

std::atomic<RunProgress> g_progress{RunProgress::kNothingToSave};
static_assert(std::atomic<RunProgress>::is_always_lock_free);
std::atomic<int64_t> g_watchdog{600000};  // milliseconds

// Ranks that are threads make the same change, at about the same time.
void change_progress(RunProgress from, RunProgress to) {
  g_progress.compare_exchange_strong(from, to);
}

// Called before a stage is loaded.
const StageSetup& announced(const StageSetup& setup) {
  g_progress = RunProgress::kNothingToSave;
  set_watchdog(setup.config);
  begin_activity("loading data and model");
  return setup;
}

}  // namespace

RunProgress run_progress() {
  return g_progress;
}

std::chrono::milliseconds watchdog_limit() {
  return std::chrono::milliseconds(g_watchdog);
}
void set_watchdog(const TrainConfig& config) {
  g_watchdog = static_cast<int64_t>(std::ceil(config.watchdog_minutes * 60000));
}

Stage::~Stage() {
  if (g_progress != RunProgress::kSaved) g_progress = RunProgress::kNothingToSave;  // it has failed
}

Stage::Stage(const StageSetup& setup) : setup_(announced(setup)) {
  learner().set_memory_callbacks(
      {.release = [this] { engine_.release_cache(); },
       .shrunk =
           [this](int64_t before, int64_t now, const std::string& error) {
             if (!is_main()) return;
             logging::warn("step ", state_.step + 1,
                           ": out of memory; micro_batch_tokens: ", before, " -> ", now,
                           ", and the update starts again (", error, ")");
             setup_.record_micro_batch(now);
           }});
  if (setup.replay != nullptr) return;
  if (is_main()) remove_abandoned_steps(setup.dir + "/journal", state_.step);
  if (config_.batch.trainer == TrainerType::kGrpo && config_.journal_mb > 0 && !state_.finished)
    journal_ = std::make_unique<Journal>(setup.dir + "/journal", config_.journal_mb, setup.comm,
                                         setup.plan);
  if (!is_main()) return;
  // The process may have been killed after writing a checkpoint but before updating its link or
  // removing old ones. The one before stays until the next save: the first update may fail.
  const std::string checkpoints = setup.dir + "/checkpoints";
  if (!start_.checkpoint.empty()) link_best(checkpoints, state_);
  if (start_.checkpoint == checkpoint_path(checkpoints, state_.step) && setup.before.empty())
    remove_old_checkpoints(
        checkpoints, state_,
        std::max<int64_t>(config_.checkpoint.keep_last, state_.finished ? 1 : 2));
  setup.reporter.begin_stage(trainer_name(config_.batch.trainer), state_.step, config_.batch.steps);
}

StepJournal* Stage::journal() {
  return setup_.replay != nullptr ? setup_.replay : journal_.get();
}

bool Stage::stop_requested() {
  double stop = setup_.stop.load();
  reduce_in_place(setup_.comm, {&stop}, Reduce::kMax);
  return stop > 0;
}

bool Stage::more() {
  const bool missed = state_.step > 0 && evaluation_due() && state_.evaluated_step != state_.step &&
                      !interrupted_ && !state_.finished;
  if ((missed || (state_.is_new() && config_.eval.at_start)) && evaluate() &&
      state_.best_step == state_.step && !scores_.reached())
    save(false);
  const std::chrono::duration<double, std::ratio<60>> since =
      std::chrono::steady_clock::now() - saved_at_;
  const double minutes = config_.checkpoint.every_minutes;
  // A checkpoint is due by the clock of rank 0.
  double stop = setup_.stop.load(), due = is_main() && minutes > 0 && since.count() >= minutes;
  if (setup_.comm.size() > 1) reduce_in_place(setup_.comm, {&stop, &due}, Reduce::kMax);
  interrupted_ = interrupted_ || stop > 0;
  const bool continues = !interrupted_ && !is_over();
  if (continues && due > 0 && saved_step_ != state_.step) save(false);
  if (continues) remember_step();
  if (continues) logs_.begin_step();
  if (continues) g_progress = RunProgress::kStep;
  begin_activity(continues ? "training" : "ending the stage");
  step_watch_.lap();
  return continues;
}

void Stage::end_step(const Metrics& metrics) {
  const double rate = learning_rate();
  start_.reference->follow(state_.step + 1);  // first: a failure leaves the state before the step
  const double seconds = step_watch_.lap("step");
  state_.seconds += seconds;
  state_.total_tokens += metrics.at("num_tokens");
  state_.step += 1;
  state_.updates = learner().optimizer().updates();
  if (const auto reward = metrics.find("reward")) state_.report["curve"].push_back(*reward);
  remember_step();
  logs_.end_step(metrics, rate, seconds);
  if (state_.step == config_.batch.steps) return;  // finish() evaluates and saves
  if (evaluation_due()) evaluate();
  if (scores_.reached() || interrupted_) return;  // finish() saves
  const int64_t every = config_.checkpoint.every;
  if (state_.best_step == state_.step || (every > 0 && state_.step % every == 0)) save(false);
}

// Returns false if it was stopped.
bool Stage::evaluate() {
  if (setup_.replay != nullptr) return true;
  begin_activity("evaluating");
  learner().check_weights();
  change_progress(RunProgress::kStep, RunProgress::kEvaluation);
  bool stopped = false;
  try {
    scores_.evaluate();
  } catch (const EvaluationStopped&) {
    interrupted_ = stopped = true;
  }
  change_progress(RunProgress::kEvaluation, RunProgress::kStep);
  return !stopped;
}

void Stage::save(bool finished) {
  if (setup_.replay != nullptr) return;
  Stopwatch clock;
  begin_activity("saving a checkpoint");
  if (journal_) journal_->flush();
  learner().check_weights();  // checkpoints hold finite numbers only
  if (is_main() && !path_exists(setup_.dir))
    throw Error(str("the run directory ", setup_.dir,
                    " is gone: it was removed or renamed during training, and nothing can be "
                    "saved; hint: start again"));
  check_equal_weights();
  state_.finished = finished;
  write_files(setup_.dir);
  saved_at_ = std::chrono::steady_clock::now();
  setup_.comm.barrier();
  clock.lap("checkpoint");
}

// Throws Error on every rank. Updates keep the weights equal to the bit.
void Stage::check_equal_weights() {
  if (setup_.comm.size() == 1) return;
  const std::string difference =
      first_difference(setup_.comm, weight_fingerprints(model().parameters()));
  if (!difference.empty())
    throw Error(str("step ", state_.step, " is not saved: ", difference,
                    ", so that a GPU, memory or a link has made an error; hint: resume from the "
                    "last checkpoint, and test the hardware of these ranks and of rank 0"));
}

void Stage::write_files(const std::string& dir) {
  const bool is_sharded = learner().optimizer().is_sharded();
  if (is_main() || is_sharded)
    save_checkpoint(dir + "/checkpoints",
                    {model(), start_.reference->saved(), *data().tokenizer, learner().optimizer(),
                     state_, reference().start, &config_.data, is_sharded ? &setup_.comm : nullptr},
                    config_.checkpoint.keep_last);
  saved_step_ = state_.step;
}

void Stage::remember_step() {
  Json report =
      std::exchange(state_.report, Json());  // grows with the steps, and only at their end
  complete_ = state_;
  state_.report = std::move(report);
}

std::string Stage::save_after_failure() {
  if (!is_main() || state_.is_new() || complete_.step != state_.step) return "";
  if (saved_step_ == state_.step) return str("; step ", state_.step, " is saved");
  if (learner().optimizer().is_sharded())
    return str("; step ", state_.step,
               " is not saved: the ranks have the optimizer's state together",
               saved_step_ > 0 ? str("; step ", saved_step_, " is saved") : "");
  if (learner().optimizer().updates() != state_.updates)
    return str("; the updates that step ", state_.step + 1, " has made are lost");
  Json report = std::move(state_.report);
  state_ = complete_;
  state_.report = std::move(report);
  try {
    learner().check_weights();
    write_files(setup_.dir);
  } catch (const Error& e) {
    return str("; step ", state_.step, " could not be saved: ", e.what());
  }
  return str("; step ", state_.step, " is saved");
}

StageEnd Stage::finish() {
  if (setup_.replay != nullptr) return StageEnd::kFinished;
  logs_.end_trace();
  bool interrupted = interrupted_ && !is_over();
  if (!interrupted && !state_.finished &&
      (state_.evaluated_step != state_.step || state_.report.find("last") == nullptr))
    interrupted = !evaluate();
  if (interrupted) {
    if (saved_step_ != state_.step) save(false);
  } else if (!state_.finished) {
    save(true);
    if (is_main() && config_.batch.trainer == TrainerType::kGrpo)
      setup_.reporter.message(final_report(state_.report));
  }
  if (is_main()) {
    const AllocatorStats memory = allocator(setup_.device).stats();
    logging::record(str("memory of ", setup_.device.str(), ": at most ", mib(memory.peak_bytes),
                        " in use, ", mib(memory.reserved_bytes), " held from the system"));
    setup_.reporter.end_stage();
  }
  logs_.finish();
  g_progress = RunProgress::kSaved;
  return interrupted ? StageEnd::kInterrupted : StageEnd::kFinished;
}

}  // namespace cohort
