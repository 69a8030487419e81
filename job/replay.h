// Replays steps of a GRPO run from its journal (job/journal.h): the steps are made again from a
// checkpoint, by the configuration of the start that made them, with the recorded replies of the
// environment and the recorded rewards, and compared with their records to the bit. No file of the
// run is written, and no program is started.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/check.h"
#include "rl/engine/trajectory.h"
#include "text/tokenizer.h"

namespace cohort {

struct ReplayOptions {
  std::string run;   // directory of a run, whose last GRPO stage is replayed, or of a stage
  int64_t step = 0;  // counted as in metrics.jsonl
  // Position of a prompt in the step, and of a completion among those of the prompt, from 0, as
  // `group` and `sample` of completions.jsonl.
  std::optional<int64_t> prompt, completion;
};

struct ReplayedCompletion {
  Trajectory trajectory;
  std::vector<std::pair<std::string, double>> rewards;  // the total last; NaN: none
  double advantage = 0;
  std::vector<double> turn_advantages;  // with credit: turn
  std::unique_ptr<Tokenizer> tokenizer;
};

// A step differs from its record.
class ReplayDifference : public Error {
 public:
  using Error::Error;
};

// Replays the steps from the last checkpoint before options.step up to it. `on_step` is called
// after each step that equals its record, on the thread of rank 0. Returns the completion that was
// asked for; nullopt: none was. Throws ReplayDifference saying the first one, and InputError, which
// says which steps can be replayed, if that is not possible: files of the journal are missing or
// damaged, or there is no such step or completion.
std::optional<ReplayedCompletion> replay_run(
    const ReplayOptions& options, const std::function<void(const std::string& line)>& on_step);

// "0.5 (3fe0000000000000)": all digits, and the bits.
std::string with_bits(double x);

}  // namespace cohort
