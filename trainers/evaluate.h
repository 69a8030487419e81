// Evaluation on held-out data, during and after training. The work is sharded over the ranks; all
// of them get the scores, bitwise equal to those of a single rank.
#pragma once

#include <array>
#include <atomic>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/data_check.h"
#include "rl/engine/engine.h"
#include "rl/engine/rollout.h"
#include "rl/evaluate.h"
#include "rl/preference.h"
#include "rl/rewards/external.h"
#include "trainers/metrics.h"

namespace cohort {

class Communicator;

// Success criterion by which completions are correct in pass@1 and pass@k.
struct CorrectConfig {
  std::string reward;    // one of the rewards, by the name RewardSet gives it; empty: the default
  double threshold = 1;  // correct: a reward of at least this
  void visit(ConfigVisitor& v) {
    v.field("reward", reward,
            "name of one of the rewards; empty: the task's checker, or the only reward");
    v.field("threshold", threshold, "a completion is right if that reward is at least this",
            {.min = -1e9, .max = 1e9});
  }
};

// Problems that are evaluated beside the held-out part. Options that are not given are those of
// `eval`, templates those of data.jsonl.
struct EvalSetConfig {
  std::string name, path;
  std::string prompt, answer;
  std::string fingerprint;  // as DataConfig::fingerprint
  std::optional<double> temperature, top_p;
  std::optional<int64_t> num_samples, max_completion_length;
  std::vector<int64_t> k;
  CorrectConfig correct;
  void visit(ConfigVisitor& v) {
    v.field("name", name, "prefix of the set's metrics: NAME/pass@1");
    v.field("path", path, "problems, one JSON object per line: a file, folder or pattern");
    v.field("prompt", prompt, "template of the prompt; empty: as the run's problems");
    v.field("answer", answer, "template of the right answer; empty: that of data.jsonl");
    v.field("fingerprint", fingerprint, "checksum of the file, as data.fingerprint");
    v.field("temperature", temperature, "of the samples; none: that of eval",
            {.min = 0.01, .max = 100});
    v.field("top_p", top_p, "of the samples; none: that of eval", {.min = 1e-6, .max = 1});
    v.field("num_samples", num_samples, "samples per problem; auto: that of eval",
            {.min = 0, .max = 4096});
    v.field("k", k, "the k of pass@k and maj@k; empty: those of eval", {.min = 1});
    v.field("max_completion_length", max_completion_length, "in tokens; auto: that of eval",
            {.min = 1, .max = 1 << 24});
    v.section("correct", correct, "criterion of correct completions; no reward: that of eval");
  }
};

struct EvalConfig {
  int64_t every = 0;           // steps between evaluations; 0: only where the trainer needs one
  bool at_start = true;        // before the first step
  int64_t size = 512;          // held-out problems at most; 0: all there are
  int64_t tokens = 1'000'000;  // held-out tokens of text at most; 0: all there are
  int64_t num_samples = 0;     // samples per problem for pass@k, besides the greedy pass@1; 0: none
  std::vector<int64_t> k;      // for pass@k and maj@k
  // Sampling options that differ from the run's.
  std::optional<double> temperature, top_p;
  std::optional<int64_t> max_completion_length;
  CorrectConfig correct;
  double stop_at = 0;  // end the stage when the greedy pass@1 reaches this; 0: off
  std::vector<EvalSetConfig> sets;
  std::string best;  // set whose pass@1 chooses the best checkpoint; empty: the held-out part
  // The options of one of the sets.
  EvalConfig options_of(const EvalSetConfig& set) const;
  void visit(ConfigVisitor& v) {
    v.field("every", every, "steps between evaluations; 0: first and last only", {.min = 0});
    v.field("at_start", at_start, "also before the first step");
    v.field("size", size, "held-out problems at most; 0: all of a file",
            {.min = 0, .max = 1 << 24});
    v.field("tokens", tokens,
            "held-out tokens of text at most, in windows spread over all of it; 0: all",
            {.min = 0});
    v.field("num_samples", num_samples, "samples per problem for pass@k; 0: greedy pass@1 only",
            {.min = 0, .max = 4096});
    v.field("k", k, "the k of pass@k and maj@k, each at most num_samples", {.min = 1});
    v.field("temperature", temperature, "of the samples; none: the run's, or 1 where that is 0",
            {.min = 0.01, .max = 100});
    v.field("top_p", top_p, "of the samples; none: the run's", {.min = 1e-6, .max = 1});
    v.field("max_completion_length", max_completion_length,
            "of greedy completions and samples, in tokens; auto: the run's",
            {.min = 1, .max = 1 << 24});
    v.section("correct", correct, "criterion of correct completions");
    v.field("stop_at", stop_at, "end when the held-out pass@1 reaches this; 0: off",
            {.min = 0, .max = 1});
    v.list("sets", sets, "further sets of problems to evaluate on (sft, grpo)");
    v.field("best", best,
            "name of the set whose pass@1 chooses the best checkpoint; empty: the held-out data");
  }
};

// Success criterion of a correct completion: a reward of at least a threshold.
struct Correctness {
  std::string name;  // the reward's name
  double threshold = 1;
  RewardFn reward;
  // If the reward is_external(): a program judges completions while others are sampled. Else null.
  // One of the two is null.
  std::shared_ptr<ExternalReward> command = nullptr;
  AnswerFn answer = {};  // the answers of maj@k; null: whole completions

  // 1 (correct), 0 (wrong), or NaN if the reward does not apply.
  double verdict(double value) const {
    return std::isnan(value) ? value : value >= threshold ? 1 : 0;
  }
  double judge(const RewardInput& input) const { return verdict(reward(input)); }
  // "countdown >= 1".
  std::string rule() const { return str(name, " >= ", threshold); }
  // The greedy score with its name: "pass@1 (countdown)", "pass@1 (countdown >= 0.5)".
  std::string measure() const { return str("pass@1 (", threshold == 1 ? name : rule(), ")"); }
};
// The criterion of `config`; if it names no reward, the task's checker for generated problems, else
// the only reward, else (without rewards) an exact match with the answer. Throws InputError if
// there are several rewards and no name, or if no reward has the name. `judges`: false if nothing
// is held out, where several rewards without a name give an empty criterion.
Correctness correctness_of(const CorrectConfig& config, const std::vector<RewardConfig>& rewards,
                           const Task* task, bool judges = true);

struct ProblemResult {
  std::string prompt, answer, completion;
  std::optional<bool> correct;  // none: cannot be judged
};
// Number of problems, from the first on, whose greedy completions are reported.
inline constexpr int64_t kReportedSamples = 8;

struct ProblemScores {
  // "pass@1" (greedy) first, then of the samples "sampled_pass@k" and "maj@k", (sft) "val_loss", of
  // the greedy completions the standard error of pass@1, how many were judged ("problems"), their
  // lengths and how many have failed, and those errors, lengths and failures of the samples; NaN:
  // not measured.
  Metrics metrics;
  std::vector<ProblemResult> samples;
  // Per problem: the fraction of its samples that can be judged, or of its greedy completion, that
  // is correct; NaN: none can be judged.
  std::vector<double> pass_rates;
};
// The sections of a configuration that an evaluation on problems reads.
struct EvalSections {
  const EvalConfig& eval;
  const BatchConfig& batch;
  const DataConfig& data;
  const SamplingConfig& sampling;
  uint64_t seed = 0;
};
struct ProblemEvaluation {
  Engine& engine;  // samples from the evaluated model
  const Dataset& data;
  const Correctness& correct;
  EvalSections config;
  int64_t step = 0;
  // Becomes true to stop the evaluation; may be null.
  const std::atomic<bool>* stop = nullptr;
  const std::vector<Example>* problems = nullptr;  // null: the held-out ones of `data`
  DialogueOptions dialogue = {};
  std::string set = {};  // its name in EvalConfig::sets, for warnings; empty: the held-out part
};
// The completions of an evaluation that the environment or the reward has failed, greedy ones and
// samples: they are in no score.
double failed_count(const Metrics& metrics);
// Thrown on every rank by an evaluation that was stopped on one of them.
class EvaluationStopped : public Error {
  using Error::Error;
};
// (sft) The mean loss over all tokens of the held-out solutions, as in training.
double held_out_loss(const ProblemEvaluation& evaluation, Communicator& comm);
// Greedy completions of every held-out problem, and config.eval.num_samples samples of each for
// pass@k, addressed by (seed, step); for sft also held_out_loss(). Failures are a warning of rank
// 0.
ProblemScores evaluate_problems(const ProblemEvaluation& evaluation, Communicator& comm);

// A set of EvalConfig::sets with its problems, rendered and fitted to the context.
struct EvalSet {
  std::string name;
  EvalConfig eval;
  Correctness correct;
  std::vector<Example> problems;
  std::string fingerprint;  // checksum of its files
  std::string too_long;     // treatment of problems that are too long; empty: there are none
};
// The parts of a run that its sets share.
struct EvalSetSource {
  const EvalConfig& eval;
  DataSections data;
  const std::vector<RewardConfig>& rewards;
  const Correctness& correct;
};
// Loads all problems of one set for a model of this context, with the tokenizer of the run's data.
// `key` is the set's, as in overrides ("eval.sets.0"). Throws InputError naming file and line.
EvalSet load_eval_set(const EvalSetSource& source, const EvalSetConfig& set, const std::string& key,
                      Dataset& data, int64_t context, ContextLimit limit);
// Loads the sets likewise. Throws InputError naming the set's key, as in "eval.sets[0].path".
std::vector<EvalSet> load_eval_sets(const EvalSetSource& source, Dataset& data, int64_t context,
                                    ContextLimit limit);
// Scores of one set, without a loss. Its random numbers are addressed by its name, so that they do
// not depend on the other sets. `run` is the evaluation of the held-out part.
ProblemScores evaluate_set(const EvalSet& set, const ProblemEvaluation& run, Communicator& comm);
// The name of a set's metric: "aime/pass@1"; the set's name replaces the prefix "eval/".
std::string set_metric_name(const std::string& set, const std::string& metric);

// A model that scores given tokens.
struct Scoring {
  const Transformer& model;
  Adapters adapters = Adapters::kOn;  // kOff: the base model
  int64_t micro_batch_tokens = kMicroBatchTokens;
  const std::atomic<bool>* stop = nullptr;  // becomes true to end with EvaluationStopped
};
// (dpo) The policy's log-probs of `count` pairs' chosen and rejected answers in turn, on every
// rank: sums in f64, with the same bits for any micro batches and ranks. pair(i) gives the
// pair_sequences() of pair i, on the rank that scores it, from any thread.
using GetPair = std::function<std::array<TokenSequence, 2>(int64_t i)>;
std::vector<AnswerLogProbs> pair_log_probs(const Scoring& scoring, int64_t count,
                                           const GetPair& pair, Communicator& comm);

// Mean next-token loss over a token stream in consecutive windows of the model's context. Of a
// stream longer than max_tokens (0: no limit), that many tokens in evenly spaced windows; NaN for
// fewer than two tokens.
double evaluate_text(const Transformer& model, const TokenStream& tokens, int64_t max_tokens,
                     int64_t micro_batch_tokens, Communicator& comm,
                     const std::atomic<bool>* stop = nullptr);

// Held-out targets of a trainer without completions: the next tokens of evaluate_text(), masked
// tokens (mlm), in windows as of it, or classes.
struct TargetEvaluation {
  const Transformer& model;
  const Dataset& data;  // after check_data()
  EvalSections config;
  const MaskingConfig& masking;
  int64_t micro_batch_tokens;
  const std::atomic<bool>* stop = nullptr;
};
// "accuracy" of the most likely label (mlm, classify), its standard error "accuracy_stderr"
// (classify), and "val_loss", means over the targets; empty if there are none. The masks depend on
// the index of a window alone: all evaluations of a text have the same.
Metrics evaluate_targets(const TargetEvaluation& evaluation, Communicator& comm);

}  // namespace cohort
