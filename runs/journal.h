// The journal of GRPO steps: what a step was given, and what it made of that. With it a replay
// (runs/replay.h) needs no program of a reward or an environment.
//
//   RUN/[STAGE/]journal/step-00000012          step 12, counted as metrics.jsonl does, of one rank;
//                       step-00000012.rank-1   of rank 1 of several
//
// A file begins with a line "cohort-journal 1 BYTES COMPRESSED CHECKSUM". A StepRecord of BYTES
// bytes follows, which zlib has compressed to COMPRESSED bytes. The checksum is 16 hex digits of
// XXH3-64, of the line before it and of all that follows the line.
#pragma once

#include <cmath>
#include <future>
#include <map>
#include <string>
#include <vector>

#include "core/non_copyable.h"
#include "trainers/grpo_step.h"

namespace cohort {

struct RecordedReply {  // EnvironmentReply
  std::vector<int32_t> tokens;
  uint8_t done = 0;
  double reward = 0;
  std::string error, messages;  // messages: JSON
};
struct RecordedCompletion {
  int64_t index = 0;  // Trajectory::index when it was sampled
  int64_t prompt_length = 0;
  uint8_t stop_reason = 0;
  std::vector<int32_t> tokens;  // the members of Trajectory
  std::vector<uint8_t> loss_mask;
  std::vector<double> logprobs;
  std::vector<RecordedReply> replies;  // one per turn that the environment answered
  std::vector<double> rewards;         // one per reward
  double total = 0;
  double advantage = std::nan("");  // NaN: another round has replaced its group
};
struct StepRecord {
  int64_t step = 0;  // from 1
  int64_t rank = 0, ranks = 1;
  int64_t planned_steps = 0;  // `steps` of the configuration
  double learning_rate = 0, beta = 0;
  uint64_t weights_before = 0, weights_after = 0;  // weights_hash()
  std::vector<RecordedCompletion> completions;     // the rank's, by index
  // nullptr if there is none.
  const RecordedCompletion* find(int64_t index) const;
};

// The hash of the trained parameters, in order (kernels/weight_hash.h). Synchronizes with the
// device.
uint64_t weights_hash(const Transformer& model);

std::string journal_path(const std::string& dir, int64_t step, int64_t rank, int64_t ranks);
// The steps in a journal with their numbers of ranks. A step with a gap in its ranks is left out.
std::map<int64_t, int64_t> list_journal(const std::string& dir);
// The bytes of a file, and the inverse, which throws InputError naming a file that is missing,
// damaged or of another version.
std::string encode_record(StepRecord record);
StepRecord read_record(const std::string& path);

// Passes everything to another environment, and keeps its replies by index, in order.
class RecordingEnvironment final : public Environment {
 public:
  using Replies = std::map<int64_t, std::vector<RecordedReply>>;
  RecordingEnvironment(Environment& inner, Replies& replies) : inner_(inner), replies_(replies) {}
  std::vector<std::string> stop_strings() const override { return inner_.stop_strings(); }
  void submit(const Example& example, const Trajectory& trajectory, int64_t step) override {
    inner_.submit(example, trajectory, step);
  }
  std::vector<EnvironmentReply> poll(bool wait) override;
  void cancel_all() override { inner_.cancel_all(); }

 private:
  Environment& inner_;
  Replies& replies_;
};

// Replies as a record has them. A trajectory whose tokens differ from the recorded ones ends with
// an error. `inner` is asked for its stop strings alone.
class ReplayedEnvironment final : public Environment {
 public:
  ReplayedEnvironment(const Environment& inner, const StepRecord& record)
      : inner_(inner), record_(record) {}
  std::vector<std::string> stop_strings() const override { return inner_.stop_strings(); }
  void submit(const Example& example, const Trajectory& trajectory, int64_t step) override;
  std::vector<EnvironmentReply> poll(bool wait) override;
  void cancel_all() override { ready_.clear(); }

 private:
  const Environment& inner_;
  const StepRecord& record_;
  int64_t step_ = 0;                 // StepRecord::step to which `turns_` belongs
  std::map<int64_t, size_t> turns_;  // replies so far, by index
  std::vector<EnvironmentReply> ready_;
};

// Writes the files of one rank on a thread of its own, at most one at a time. A file that cannot be
// written is a warning, and the run continues.
class Journal final : public StepJournal, NonCopyable {
 public:
  // `step`: steps done; the files of later ones, which will be made again, are removed. The oldest
  // files are removed when those of this rank exceed `bytes`.
  Journal(std::string dir, int64_t bytes, const Communicator& comm, int64_t step);
  ~Journal() override { flush(); }
  Environment* wrap(Environment* inner) override;
  void begin(const GrpoStep& step) override;
  void add(std::span<const Trajectory> completions, RewardSet::Scores& scores) override;
  void replace(int64_t place, int64_t index) override { sampled_[place] = index; }
  void end(const GrpoStep& step, const ScoredRollouts& rollouts) override;
  void flush() override;

 private:
  void guard(const std::function<void()>& work);
  void write(const StepRecord& record);

  const std::string dir_;
  const int64_t bytes_;
  const int rank_, ranks_;
  StepRecord record_;
  std::map<int64_t, int64_t>
      sampled_;  // index of the completion at a place of the step, if changed
  RecordingEnvironment::Replies replies_;
  std::optional<RecordingEnvironment> environment_;
  std::optional<uint64_t> weights_;   // hash after the last step
  std::map<int64_t, int64_t> sizes_;  // bytes of each step's file
  bool failing_ = false;              // the last file could not be written
  std::future<void> pending_;
};

}  // namespace cohort
