// Rewards: pure functions of one completion. They never see the model, the batch or the clock.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/config.h"
#include "data/example.h"
#include "rl/trajectory.h"

namespace cohort {

struct RewardConfig {
  std::string name;  // of the table below
  double weight = 1;
  // `format`: what the whole completion must match. The others: where the answer is (group 1 of the
  // last match, or the whole match of a pattern without groups); empty: the whole completion.
  std::string pattern;
  // `command` (rl/rewards/command.h): the program, where it runs, how many there are, the seconds
  // that each has for an answer and for its first one, and MiB of address space (0: no limit).
  std::string run, directory;
  int64_t workers = 1, memory = 0;
  double timeout = 10, start_timeout = 60;
  bool batch = false;
  void visit(ConfigVisitor& v);
};

struct RewardInput {
  const Example& example;
  std::string_view completion;
  int64_t index = 0;  // of the completion within the step, over all ranks
  int64_t step = 0;
};
// NaN: not applicable to this example.
using RewardFn = std::function<double(const RewardInput&)>;

// A kind of reward and how to make one. `task` is the generated task the data come from, or
// nullptr.
struct RewardEntry {
  const char* name;
  const char* what;
  RewardFn (*make)(const RewardConfig& config, const Task* task);
};
// One entry per line of COHORT_REWARDS in rl/rewards/rewards.h.
const std::vector<RewardEntry>& reward_table();

// Throws InputError for an unknown name, which lists the known ones, and as the reward does.
RewardFn make_reward(const RewardConfig& config, const Task* task);

// Several weighted rewards.
class CommandReward;

class RewardSet {
 public:
  // Throws InputError: unknown name (lists the known ones), a bad pattern, a reward that needs a
  // task without one, no rewards.
  RewardSet(const std::vector<RewardConfig>& configs, const Task* task);
  // The configured name, with "_2", "_3", ... for repetitions.
  const std::vector<std::string>& names() const { return names_; }

  struct Scores {
    std::vector<std::vector<double>> each;  // [reward][sample], NaN where not applicable
    std::vector<double> total;  // sum of weight * reward over applicable ones; NaN if none applies
    // [reward]: samples for which a command has failed (none: it is no command), and why the first
    // of them did.
    std::vector<std::optional<int64_t>> failed;
    std::vector<std::string> fault;
  };
  // Hands a completion to the commands, so that they work while others are sampled. It must be
  // among those that score() is given next, which differ in Trajectory::index.
  void submit(const Example& example, const Trajectory& trajectory, int64_t step) const;
  // Of each trajectory: as many of one prompt after the other, as Sampler::sample() gives them.
  // Throws InputError naming the reward and the completion for an infinite value.
  Scores score(std::span<const Example> prompts, std::span<const Trajectory> trajectories,
               int64_t step = 0) const;

 private:
  std::vector<std::string> names_;
  std::vector<double> weights_;
  std::vector<RewardFn> rewards_;
  std::vector<std::shared_ptr<CommandReward>> commands_;  // of each reward; null: it is none
};

}  // namespace cohort
