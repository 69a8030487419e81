// A whole run: every stage of a plan in its own directory, each from the weights of the one before,
// on all ranks.
//
//   RUN/config.yaml  log.txt           one stage: metrics.jsonl, completions.jsonl and checkpoints/
//                                      beside them;
//   RUN/1-sft/...  RUN/2-grpo/...      several stages: in numbered directories
//   RUN/starts/1.yaml  2.yaml ...      the configuration of each start; config.yaml is the newest
#pragma once

#include <atomic>
#include <optional>
#include <string>

#include "distributed/process_group.h"
#include "job/config.h"
#include "job/log_file.h"
#include "job/preview.h"
#include "job/run_directory.h"
#include "job/stage.h"

namespace cohort {

struct RunResult {
  std::string run_dir;
  StageEnd end = StageEnd::kFinished;
  // Held-out score of the last stage before its first step and after its last, and its name:
  // "pass@1 (countdown)", or "validation loss" (whose score is minus the loss). NaN: not measured.
  double before = 0, after = 0;
  std::string measure;                     // empty: nothing is held out
  double loss_before = 0, loss_after = 0;  // mean over the held-out tokens; NaN: not measured
  TrainerType last_trainer = TrainerType::kPretrain;
};

// Starts the spawner of the plan's programs and returns true, if it has any. Must be called
// while this process is small, before it has a model.
bool prepare_programs(const RunPlan& plan);

// The directory of a stage of the run in `run_dir`: that one itself if it is the only stage.
std::string stage_directory(const RunPlan& plan, const std::string& run_dir, size_t index);

// A plan ready to run, with a directory that this process has locked.
//
// With a `group`, which must outlive it, all its processes execute the run together and make the
// same calls. Rank 0 locks the directory and writes; the others read it through a shared file
// system. A process uses the GPU of its local rank.
class Run {
 public:
  // Makes a new run directory and writes the resolved configuration there, with micro batches
  // chosen for this machine if they are "auto".
  static Run create(RunPlan plan, ProcessGroup* group = nullptr);
  // Resumes the run in plan.output_dir, or starts it there. Throws InputError if the directory has
  // a run of another configuration, naming the key, or files that are no run's. Keys that change no
  // update, the number of steps among them, may differ; `auto` keeps the recorded micro batches.
  static Run continue_or_create(RunPlan plan, ProcessGroup* group = nullptr);
  // Resumes RUN_DIR with its configuration and key=value overrides, which become part of it as soon
  // as something is trained with them. Throws InputError if it is not a run directory. `callbacks`:
  // for bind_callbacks().
  static Run resume(const std::string& run_dir, std::span<const std::string> overrides,
                    ProcessGroup* group = nullptr, const Callbacks& callbacks = {});

  const std::string& dir() const { return dir_; }
  const RunPlan& plan() const { return plan_; }
  // Result of preview_plan() for a new run on rank 0; else empty.
  const std::vector<StagePreview>& preview() const { return preview_; }
  // Runs the remaining stages. `stop` requests a checkpoint and an early end. A resumed stage whose
  // first update is not finite falls back to the previous checkpoint, repeatedly if necessary. Rank
  // 0 writes a trace of `profile_steps` steps into the directory of each stage.
  RunResult execute(Reporter& reporter, const std::atomic<bool>& stop, int64_t profile_steps = 0);
  // Throws Error if lines of log.txt could not be written.
  void finish_log() const {
    if (log_ != nullptr) log_->finish();
  }

 private:
  Run(RunPlan plan, std::string dir, ProcessGroup* group);
  // `make_directory` returns the path of the directory that it has made for the wanted one.
  static Run start(RunPlan plan, ProcessGroup* group,
                   std::string (*make_directory)(const std::string& wanted));
  static Run resume_plan(RunPlan plan, const std::string& dir, const std::string& start,
                         ProcessGroup* group);
  StageEnd run_stage(size_t index, Reporter& reporter, const std::atomic<bool>& stop);
  StageEnd train_stage(size_t index, const std::string& before, Reporter& reporter,
                       const std::atomic<bool>& stop);
  std::string stage_dir(size_t index) const { return stage_directory(plan_, dir_, index); }
  std::string why_fixed(size_t index) const;
  void record_start();
  void record_micro_batch(size_t index, int64_t tokens);
  bool is_main() const { return group_ == nullptr || group_->rank() == 0; }
  Communicator& communicator(Device device);

  int64_t profile_steps_ = 0;
  RunPlan plan_;
  RunPlan recorded_plan_;          // plan_ as config.yaml has it
  std::string journal_plan_;       // recorded_plan_ as a journal has it
  std::string start_ = "new run";  // or the overrides
  bool recorded_ = false;
  std::vector<StagePreview> preview_;
  Json report_;  // TrainState::report of the last stage that was run (rank 0)
  std::string dir_;
  ProcessGroup* group_;
  std::optional<FileLock> lock_;        // rank 0 only
  std::shared_ptr<KeptLines> log_;      // rank 0 only: log.txt, shared with the logging
  std::unique_ptr<Communicator> comm_;  // between the group's ranks, for comm_device_
  Device comm_device_;
};

}  // namespace cohort
