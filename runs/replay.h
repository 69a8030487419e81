// Replays steps of a GRPO run from its journal (runs/journal.h): the steps are made again from a
// checkpoint, with the recorded replies of the environment and the recorded rewards, and compared
// with their records to the bit. No file is written, and no program is started.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "rl/engine/trajectory.h"

namespace cohort {

struct ReplayOptions {
  std::string run;   // directory of a run, whose last GRPO stage is replayed, or of a stage
  int64_t step = 0;  // counted as in metrics.jsonl
  // Position of a prompt in the step, and of a completion among those of the prompt, from 0, as
  // `group` and `sample` of completions.jsonl.
  std::optional<int64_t> prompt, completion;
  // Called after each step that equals its record, on the thread of rank 0.
  std::function<void(const std::string& line)> on_step = [](const std::string&) {};
};

struct ReplayedCompletion {
  Trajectory trajectory;
  std::vector<std::pair<std::string, double>>
      rewards;  // names and values, the total last; NaN: none
  double advantage = 0;
  std::vector<std::string> texts;  // one per token, special tokens included
  // The text of each span of sampled or observed tokens, the prompt first, special tokens included.
  std::vector<std::string> spans;
  std::vector<size_t> ends;  // where each span ends, in tokens
};

struct ReplayResult {
  std::string difference;  // the first one; empty: all steps equal their records
  // The completion that was asked for, if there is no difference.
  std::optional<ReplayedCompletion> completion;
};

// Replays the steps from the last checkpoint before options.step up to it. Throws InputError, which
// says which steps can be replayed, if that is not possible: files of the journal are missing or
// damaged, or there is no such step or completion.
ReplayResult replay_run(const ReplayOptions& options);

}  // namespace cohort
