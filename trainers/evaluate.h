// Evaluation on held-out data, during and after training. The ranks share the work; all of them
// have the scores, with the bits that one rank alone would give.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "rl/engine.h"
#include "rl/evaluate.h"
#include "rl/rewards/command.h"
#include "trainers/dataset.h"
#include "trainers/reporter.h"

namespace cohort {

class Communicator;

// What counts as right: a reward of at least a threshold.
struct Correctness {
  std::string name;  // of the reward
  double threshold = 1;
  RewardFn reward;
  // Of a reward that is a program, which judges completions while others are sampled; else null.
  std::shared_ptr<CommandReward> command = nullptr;

  // 1 (right), 0 (wrong), or NaN where the reward does not apply.
  double verdict(double reward) const;
  double judge(const RewardInput& input) const { return verdict(reward(input)); }
  // "countdown >= 1".
  std::string rule() const;
  // The greedy score with its name: "pass@1 (countdown)", "pass@1 (countdown >= 0.5)".
  std::string measure() const;
};
// What config.eval.correct says; where it names no reward, the task's checker for generated
// problems, else the only reward, else (there are no rewards) an exact match with the answer.
// Throws InputError if there are several rewards and no name, or if none has the name.
Correctness correctness_of(const TrainConfig& config, const Task* task);

struct ProblemResult {
  std::string prompt, answer, completion;
  std::optional<bool> correct;  // none: cannot be judged
};
// Problems whose greedy completions are told: the first so many.
inline constexpr int64_t kToldProblems = 8;

struct ProblemScores {
  // "pass@1" (greedy) first, then the sampled "pass@k", (sft) "val_loss", and of the greedy
  // completions the standard error of pass@1, their number and their lengths; NaN: not measured.
  Metrics metrics;
  std::vector<ProblemResult> told;
  // Of each problem: the share of its samples, or of one greedy completion, that is right; NaN
  // where one cannot be judged.
  std::vector<double> pass_rates;
};
struct ProblemEvaluation {
  Engine& engine;  // of the model
  const Dataset& data;
  const Correctness& correct;
  const TrainConfig& config;
  int64_t step = 0;
};
// Greedy completions of every held-out problem, and config.eval.num_samples samples of each for
// pass@k, addressed by (seed, step); for sft also the mean loss over all tokens of the held-out
// solutions, as it is trained.
ProblemScores evaluate_problems(const ProblemEvaluation& what, Communicator& comm);

struct TextEvaluation {
  const Transformer& model;
  const TokenStream& tokens;
  const TrainConfig& config;
};
// Mean next-token loss over a token stream in consecutive windows of the model's context, of a
// longer stream than config.eval.tokens in so many of them at equal distances; NaN for a stream
// without a second token.
double evaluate_text(const TextEvaluation& what, Communicator& comm);

}  // namespace cohort
