// Evaluation on held-out data, during and after training. The work is sharded over the ranks; all
// of them get the scores, bitwise equal to those of a single rank.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "rl/engine/engine.h"
#include "rl/evaluate.h"
#include "rl/rewards/command.h"
#include "trainers/dataset.h"
#include "trainers/metrics.h"

namespace cohort {

class Communicator;

// Criterion of a correct completion: a reward of at least a threshold.
struct Correctness {
  std::string name;  // the reward's name
  double threshold = 1;
  RewardFn reward;
  // The program, if the reward is one: judges completions while others are sampled. Else null.
  std::shared_ptr<CommandReward> command = nullptr;

  // 1 (correct), 0 (wrong), or NaN if the reward does not apply.
  double verdict(double reward) const;
  double judge(const RewardInput& input) const { return verdict(reward(input)); }
  // "countdown >= 1".
  std::string rule() const;
  // The greedy score with its name: "pass@1 (countdown)", "pass@1 (countdown >= 0.5)".
  std::string measure() const;
};
// The criterion of config.eval.correct; if it names no reward, the task's checker for generated
// problems, else the only reward, else (without rewards) an exact match with the answer. Throws
// InputError if there are several rewards and no name, or if no reward has the name.
Correctness correctness_of(const TrainConfig& config, const Task* task);

struct ProblemResult {
  std::string prompt, answer, completion;
  std::optional<bool> correct;  // none: cannot be judged
};
// Number of problems, from the first on, whose greedy completions are reported.
inline constexpr int64_t kReportedSamples = 8;

struct ProblemScores {
  // "pass@1" (greedy) first, then the sampled "pass@k", (sft) "val_loss", and of the greedy
  // completions the standard error of pass@1, their number and their lengths; NaN: not measured.
  Metrics metrics;
  std::vector<ProblemResult> samples;
  // Per problem: the fraction of its samples, or of its greedy completion, that is correct; NaN if
  // one cannot be judged.
  std::vector<double> pass_rates;
};
struct ProblemEvaluation {
  Engine& engine;  // samples from the evaluated model
  const Dataset& data;
  const Correctness& correct;
  const TrainConfig& config;
  int64_t step = 0;
};
// Greedy completions of every held-out problem, and config.eval.num_samples samples of each for
// pass@k, addressed by (seed, step); for sft also the mean loss over all tokens of the held-out
// solutions, as in training.
ProblemScores evaluate_problems(const ProblemEvaluation& evaluation, Communicator& comm);

struct TextEvaluation {
  const Transformer& model;
  const TokenStream& tokens;
  const TrainConfig& config;
};
// Mean next-token loss over a token stream in consecutive windows of the model's context. Of a
// stream longer than config.eval.tokens, that many tokens in evenly spaced windows; NaN for fewer
// than two tokens.
double evaluate_text(const TextEvaluation& evaluation, Communicator& comm);

}  // namespace cohort
