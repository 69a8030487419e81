// The inputs of a stage, and what it starts from: data, model, optimizer and state of the newest
// checkpoint, of init_from, or new ones; and the reference policy of GRPO.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/non_copyable.h"
#include "data/dataset.h"
#include "job/checkpoint.h"
#include "job/config.h"
#include "job/pair_reference.h"
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
  bool is_main() const { return comm.rank() == 0; }
};

// The policy that the KL term refers to: the model at the start of the stage, moved by
// ref_sync_every, the base of its adapters, the policy itself, or a teacher.
class Reference : NonCopyable {
 public:
  // For the training of `model`, which has been loaded from `checkpoint`; empty: the stage is new,
  // and `model` is the reference. A checkpoint has the reference if beta was above 0 when it was
  // saved. `state.teacher` is set, or compared with the one that is found; `data` must outlive it.
  Reference(const StageSetup& setup, const Transformer& model, const std::string& checkpoint,
            const Dataset& data, TrainState& state);
  // Without a model unless this is grpo with beta > 0.
  ReferencePolicy policy() const;
  // The one that checkpoints have; nullptr: it is not theirs.
  const Transformer* saved() const { return is_teacher() ? nullptr : model_.get(); }
  // Moves it towards the model in training if that is due after step `step`.
  void follow(int64_t step);

 private:
  bool is_teacher() const { return config_.grpo.reference_type() == ReferenceType::kFolder; }
  void load_teacher(const StageSetup& setup, const Dataset& data, TrainState& state);
  void load_own(const StageSetup& setup, const std::string& checkpoint);

  const TrainConfig& config_;
  const Transformer& trained_;
  std::unique_ptr<Transformer> model_;  // unless the model has adapters
  std::vector<Tensor> adapters_;        // those of the start
  std::function<std::vector<int32_t>(const Example&)> prompt_;
};

struct ModelStart : NonCopyable {
  // Loads data and model: from the newest checkpoint in `dir` if there is one (resume), else from
  // init_from, else fresh. Throws InputError on ranks that do not start alike.
  explicit ModelStart(const StageSetup& setup);

  std::string checkpoint;  // that the stage is resumed from; empty: a new stage
  TrainState state;
  Dataset data;
  std::unique_ptr<Environment> environment;
  Correctness correct;
  std::vector<EvalSet> sets;  // eval.sets
  std::unique_ptr<Learner> learner;
  std::optional<Reference> reference;
  PairReferences pair_references;  // (dpo) of the pairs that the rest of the stage needs
  int64_t pinned = 0;              // bytes of optimizer state in page-locked memory
};

}  // namespace cohort
