// Rewards: pure functions of one completion. They have no access to the model or the batch.
#pragma once

#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "config/visitor.h"
#include "data/example.h"
#include "rl/caller.h"
#include "rl/engine/trajectory.h"

namespace cohort {

// `judge` (rl/rewards/judge.h)
struct JudgeConfig {
  std::string model, prompt, system, field;
  std::vector<double> scale = {0, 10};
  double temperature = 0;
  int64_t max_tokens = 64, votes = 1;
  bool operator==(const JudgeConfig&) const = default;
  void visit(ConfigVisitor& v);
};

// `code` (rl/rewards/code.cpp).
struct CodeConfig {
  std::string fence = "required", prefix, credit = "all", sandbox = "auto";
  bool inside = false;
  bool operator==(const CodeConfig&) const = default;
  void visit(ConfigVisitor& v);
};

void visit_sandbox(ConfigVisitor& v, std::string& sandbox);

struct RewardConfig {
  std::string name;  // RewardEntry::name, or that of a callback
  double weight = 1;
  // `format`: pattern that the whole completion must match. Other rewards: pattern that finds the
  // answer (group 1 of the last match, or the whole match of a pattern without groups); empty: the
  // whole completion.
  std::string pattern;
  ProgramConfig program;  // `command` (rl/rewards/external.h)
  // `http` and `judge`: the server, the requests that it has at a time, and the file of its answers
  // (AnswerLog; no key; empty: none).
  ServerConfig server;
  int64_t concurrent = 32;
  std::string answers;
  JudgeConfig judge;
  CodeConfig code;
  bool batch = false;
  // Rewards by length (rl/rewards/length.cpp) and `repetition`.
  int64_t buffer = 0, max_length = 0, n = 3;
  double penalty = 1;
  // `cosine`: the reward that decides whether an answer is right (one of RewardSet::names()), its
  // least value for a right answer, and the rewards of no tokens and of max_length.
  std::string correct;
  double threshold = 1;
  std::vector<double> right = {1, 0.5}, wrong = {-1, -0.5};
  bool operator==(const RewardConfig&) const = default;
  void visit(ConfigVisitor& v);
};

// The reward by the function reward() of a Python file, as a configuration writes it.
inline std::string function_reward(const std::string& file) {
  return str("{name: command, run: python3 PATH/TO/cohort/scripts/cohort_reward.py ", file, "}");
}
inline bool is_program(const RewardConfig& reward) {
  return reward.name == "command" || reward.name == "code";
}
// True if a server computes it.
inline bool is_served(const RewardConfig& reward) {
  return reward.name == "http" || reward.name == "judge";
}
// True if an ExternalReward computes it: a program, a server or a callback.
inline bool is_external(const RewardConfig& reward) {
  return reward.program.callback != nullptr || is_program(reward) || is_served(reward);
}

// The value of a reward that does not apply to an example.
inline constexpr double kNotApplicable = std::numeric_limits<double>::quiet_NaN();
struct RewardInput {
  const Example& example;
  std::string_view completion;
  int64_t index = 0;  // completion within the step, over all ranks
  int64_t step = 0;
  // The sampled tokens, the stop token included; nullopt if they are unknown: then the rewards of
  // tokens do not apply.
  std::optional<std::vector<int32_t>> tokens = {};
  int64_t max_tokens = 0;  // max_completion_length; 0: unknown
  StopReason stop_reason = StopReason::kStopToken;
  double correct = kNotApplicable;  // the reward that RewardConfig::correct names
  // Trajectory::environment_reward and transcript; nullptr: no dialogue.
  double environment_reward = kNotApplicable;
  const Json* transcript = nullptr;
  const std::string* other_answer = nullptr;  // one of Example::other_answers, to be compared with
  const std::string& answer() const { return other_answer ? *other_answer : example.answer; }
  bool truncated() const { return is_truncated(stop_reason); }
};
// The input for a completion. Its tokens are unknown if the trajectory has none.
RewardInput reward_input(const Example& example, const Trajectory& trajectory, int64_t step);
using RewardFn = std::function<double(const RewardInput&)>;

// A kind of reward and its factory. `task` is the generated task that the data come from, or
// nullptr.
struct RewardEntry {
  const char* name;
  const char* description;
  const char* keys;  // the keys that it takes besides name and weight, separated by blanks
  RewardFn (*make)(const RewardConfig& config, const Task* task);
};
// One entry per line of COHORT_REWARDS in rl/rewards/rewards.h.
const std::vector<RewardEntry>& reward_table();

// Null if is_external(). Throws InputError for an unknown name (the message lists the known ones),
// for keys or values that the reward rejects, and for `cosine`, which only a RewardSet can compute.
RewardFn make_reward(const RewardConfig& config, const Task* task);

// True if the reward depends on the sampled tokens, not only on whether the answer is right.
bool scores_tokens(const RewardConfig& config);

class ExternalReward;

// Several weighted rewards.
class RewardSet {
 public:
  // Throws InputError for an unknown name, a bad pattern, a reward that needs a task without one,
  // or a criterion (RewardConfig::correct) that is not in the list. Of an empty list, every
  // completion gets 0. Equal external rewards are one, since programs may be expensive to start:
  // `running`, if that is what is asked for.
  RewardSet(const std::vector<RewardConfig>& configs, const Task* task,
            const std::shared_ptr<ExternalReward>& running = nullptr);
  // The configured name, with "_2", "_3", ... for repetitions.
  const std::vector<std::string>& names() const { return names_; }
  const std::vector<double>& weights() const { return weights_; }  // one per name

  struct Scores {
    // [reward][sample], NaN where not applicable: all of a dialogue whose environment has failed.
    std::vector<std::vector<double>> each;
    std::vector<double> total;  // sum of weight * reward over applicable ones; NaN if none applies
    // [reward]: number of samples for which it has failed (nullopt: not is_external()), and the
    // error of the first of them.
    std::vector<std::optional<int64_t>> failed;
    std::vector<std::string> first_error;
    // [sample]: the first of its rewards that has failed, with its error; empty: none has.
    std::vector<std::string> errors;
    // Numbers of samples by the names of their metrics: those for which each external reward has
    // failed, and those of `code` that have passed all tests, been too slow or had no code.
    std::map<std::string, int64_t> counts;
  };
  // Sends a completion to the external rewards, so that they run while others are sampled. The next
  // call of score() must include it. Trajectory::index must be unique among its trajectories.
  void submit(const Example& example, const Trajectory& trajectory, int64_t step) const;
  // Scores of `trajectories`, which are in the order of Sampler::sample(): equally many per prompt.
  // Throws InputError naming the reward and the completion for an infinite value.
  Scores score(std::span<const Example> prompts, std::span<const Trajectory> trajectories,
               int64_t step = 0) const;

 private:
  void find_criteria(const std::vector<RewardConfig>& configs);

  std::vector<std::string> names_;
  std::vector<double> weights_;
  std::vector<RewardFn> rewards_;
  std::vector<std::shared_ptr<ExternalReward>> external_;  // [reward]; null: not is_external()
  std::vector<std::optional<size_t>> criteria_;  // [reward]: position of RewardConfig::correct
  std::vector<size_t> order_;                    // all positions, those with a criterion last
};

}  // namespace cohort
