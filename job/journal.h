// The journal of GRPO steps: what a step was given, and what it made of that. With it a replay
// (job/replay.h) needs no program of a reward or an environment.
//
//   RUN/[STAGE/]journal/step-00000012.rank-0-of-2    step 12, counted as metrics.jsonl does
//
// A file begins with a line "cohort-journal 3 BYTES CHECKSUM". A StepRecord of BYTES bytes follows,
// which zlib has compressed. The checksum is 16 hex digits of XXH3-64, of the line before it and of
// all that follows the line.
#pragma once

#include <future>
#include <map>
#include <string>
#include <vector>

#include "core/non_copyable.h"
#include "job/config.h"
#include "trainers/grpo_step.h"

namespace cohort {

struct RecordedCompletion {
  int64_t index = 0;  // Trajectory::index when it was sampled
  int64_t prompt_length = 0;
  std::string stop_reason;  // its name
  std::vector<int32_t> tokens;
  std::vector<uint8_t> loss_mask;
  std::vector<double> logprobs;
  std::vector<EnvironmentReply> replies;  // to the beginning and the turns
  std::vector<double> rewards;            // one per name
  double total = 0;
};
struct StepRecord {
  int64_t step = 0;  // from 1
  std::string plan;  // journal_plan() of the run (rank 0)
  std::vector<std::string> reward_names;
  double learning_rate = 0, beta = 0;
  uint64_t weights_before = 0, weights_after = 0;  // weights_hash()
  std::vector<RecordedCompletion> completions;     // the rank's, by index
  std::vector<double> advantages;  // one per completion that the update takes, in order
  // nullptr if there is none.
  const RecordedCompletion* find(int64_t index) const;
};

// The sum of the fingerprints of the trained parameters. Synchronizes with the device.
uint64_t weights_hash(const Transformer& model);

// The configuration that a journal records, as YAML: without name and output_dir, which make no
// difference to any step.
std::string journal_plan(RunPlan plan);

std::string journal_path(const std::string& dir, int64_t step, int64_t rank, int64_t ranks);
// The steps of which a journal has all ranks, with their numbers of ranks.
std::map<int64_t, int64_t> list_journal(const std::string& dir);
// Removes the files of steps after `step`, which a resumed run makes again. A failure is a warning.
void remove_abandoned_steps(const std::string& dir, int64_t step);
// The bytes of a file, and the inverse, which throws InputError naming a file that is missing,
// damaged or of another version. `check` may throw InputError saying what else is wrong with it.
std::string encode_record(StepRecord record);
StepRecord read_record(
    const std::string& path,
    const std::function<void(const StepRecord&)>& check = [](const StepRecord&) {});

// Replies as a record has them. A trajectory whose tokens differ from the recorded ones ends with
// an error. `inner` is asked for no reply.
class ReplayedEnvironment final : public Environment {
 public:
  ReplayedEnvironment(const Environment& inner, const StepRecord& record)
      : inner_(inner), record_(record) {}
  std::vector<std::string> stop_strings() const override { return inner_.stop_strings(); }
  bool starts() const override { return inner_.starts(); }
  Example started(const Example& example, const EnvironmentReply& reply) const override {
    return inner_.started(example, reply);
  }
  void submit(const Example& example, const Trajectory& trajectory, int64_t step) override;
  std::vector<EnvironmentReply> poll(bool wait) override;
  void cancel_all() override { ready_.clear(); }

 private:
  const Environment& inner_;
  const StepRecord& record_;
  std::vector<EnvironmentReply> ready_;
};

// Writes the files of one rank on a thread of its own, at most one at a time. A file that cannot be
// written is a warning, and the run continues.
class Journal final : public StepJournal, NonCopyable {
 public:
  // The oldest files are removed when those of this rank exceed `mib` MiB. `plan`: journal_plan()
  // of the run, which rank 0 records after each step; nullptr: not known.
  Journal(std::string dir, int64_t mib, const Communicator& comm, const std::string* plan);
  ~Journal() override { flush(); }
  void attach(DialogueOptions& dialogue) override;
  void begin(const GrpoStep& step) override;
  void add(std::span<Group> groups) override;
  void end(const GrpoStep& step, std::span<const Group> groups) override;
  // Returns once all that was recorded is on disk, or reported as lost.
  void flush();

 private:
  void guard(const std::function<void()>& work);
  void write(StepRecord record);

  const std::string dir_;
  const int64_t bytes_;
  const int rank_, ranks_;
  const std::string* const plan_;
  StepRecord record_;
  std::map<int64_t, std::vector<EnvironmentReply>> replies_;  // by index, in order
  std::optional<uint64_t> weights_;                           // hash after the last step
  std::map<std::string, int64_t> sizes_;                      // bytes of each file, by its path
  bool failing_ = false;                                      // the last file could not be written
  std::future<void> pending_;
};

}  // namespace cohort
