#include "trainers/evaluate.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "config/visitor.h"
#include "core/allocator.h"
#include "core/log.h"
#include "core/sizes.h"
#include "data/class_examples.h"
#include "data/parallel_try.h"
#include "nn/model_folder.h"
#include "sys/files.h"
#include "trainers/across_ranks.h"
#include "trainers/sampling.h"

namespace cohort {
namespace {

// Index into `names` of the reward of eval.correct.
size_t chosen_reward(const CorrectConfig& config, const std::vector<std::string>& names) {
  const std::string list = join(names, ", ");
  if (config.reward.empty() && names.size() > 1)
    throw InputError(str("eval.correct.reward: there are ", names.size(), " rewards (", list,
                         ") and pass@1 needs one as its criterion; hint: "
                         "eval.correct.reward=",
                         names[0]));
  const auto it = config.reward.empty() ? names.begin() : std::ranges::find(names, config.reward);
  if (it != names.end()) return static_cast<size_t>(it - names.begin());
  throw InputError(str("eval.correct.reward: no reward is called '", config.reward, "'; ",
                       list.empty() ? "there are none" : "the rewards are " + list,
                       did_you_mean(config.reward, names)));
}

// Completions of this rank's problems.
struct Judged {
  std::vector<Example> prompts;  // with what begins their dialogues
  std::vector<Trajectory> trajectories;
  std::vector<double> verdicts;  // for all problems' samples, on every rank
  // Completions of all ranks that the environment or the reward has failed, and the first error.
  double failed = 0;
  std::string first_error;
  void add_failure(const std::string& source, const std::string& error) {
    if (failed++ == 0) first_error = str(source, ": ", error);
  }
};

// Shares out the failures of all ranks, and warns of them.
void report_failures(const ProblemEvaluation& evaluation, Communicator& comm, Judged& judged) {
  judged.first_error = first_text(comm, judged.first_error);
  reduce_in_place(comm, {&judged.failed});
  if (judged.failed == 0 || comm.rank() != 0) return;
  logging::warn("evaluation", evaluation.set.empty() ? "" : " of " + evaluation.set, ": ",
                judged.failed, " of ", judged.verdicts.size(),
                " completions could not be judged, and count in no score; the first: ",
                judged.first_error, "; hint: workers.log of a run has what its programs printed");
}

// Throws EvaluationStopped if a rank was stopped.
void check_stopped(Communicator& comm, bool stopped) {
  double any = stopped;
  reduce_in_place(comm, {&any}, Reduce::kMax);
  if (any > 0) throw EvaluationStopped("the evaluation was stopped");
}

const std::vector<Example>& problems_of(const ProblemEvaluation& evaluation) {
  return evaluation.problems != nullptr ? *evaluation.problems : evaluation.data.held_out;
}

SamplingConfig sampling_of(const ProblemEvaluation& evaluation, double temperature) {
  const EvalConfig& eval = evaluation.config.eval;
  SamplingConfig sampling =
      sampling_for(evaluation.config.sampling, evaluation.config.data, *evaluation.data.tokenizer);
  sampling.temperature = temperature;
  sampling.top_p = eval.top_p.value_or(sampling.top_p);
  sampling.max_completion_length =
      eval.max_completion_length.value_or(sampling.max_completion_length);
  return sampling;
}

Judged sample_and_judge(const ProblemEvaluation& evaluation, Communicator& comm, double temperature,
                        int64_t samples) {
  const std::vector<Example>& problems = problems_of(evaluation);
  const auto count = static_cast<int64_t>(problems.size());
  const RankShard shard = shard_of(count, comm.rank(), comm.size());
  SampleAddress address{.seed = evaluation.config.seed, .step = -1 - evaluation.step};
  address.prompt_indices.resize(static_cast<size_t>(shard.end - shard.begin));
  std::iota(address.prompt_indices.begin(), address.prompt_indices.end(), shard.begin);
  const Sampler sampler(evaluation.engine, *evaluation.data.tokenizer,
                        sampling_of(evaluation, temperature), evaluation.dialogue);
  Judged out;
  out.prompts = sampler.begin(
      std::span(problems).subspan(static_cast<size_t>(shard.begin), address.prompt_indices.size()),
      samples, address);
  const Correctness& correct = evaluation.correct;
  const auto submit = [&](const Example& example, const Trajectory& t) {
    if (correct.command != nullptr && t.environment_error.empty())
      correct.command->submit(reward_input(example, t, evaluation.step));
  };
  const auto unless_stopped = [&](const Trajectory&) {
    if (evaluation.stop != nullptr && *evaluation.stop) throw EvaluationStopped("stopped");
    return true;
  };
  bool stopped = false;
  try {
    out.trajectories = sampler.sample(out.prompts, samples, address,
                                      {.on_finished = submit, .on_token = unless_stopped});
  } catch (const EvaluationStopped&) {
    stopped = true;
  }
  check_stopped(comm, stopped);
  out.verdicts.assign(static_cast<size_t>(count * samples), 0);
  for (const Trajectory& t : out.trajectories) {
    double& verdict = out.verdicts[static_cast<size_t>(t.index)];
    const Example& prompt = out.prompts[static_cast<size_t>(t.group - shard.begin)];
    if (correct.command == nullptr && t.environment_error.empty())
      verdict = correct.judge(reward_input(prompt, t, evaluation.step));
    if (t.environment_error.empty()) continue;
    verdict = kNotApplicable;
    out.add_failure("environment", t.environment_error);
  }
  if (correct.command != nullptr)
    for (const auto& [index, result] : correct.command->collect()) {
      out.verdicts[static_cast<size_t>(index)] = correct.verdict(result.value);
      if (!result.error.empty()) out.add_failure("reward " + correct.name, result.error);
    }
  report_failures(evaluation, comm, out);
  // One rank has each verdict and the others 0, so the sums are exact; a NaN stays one.
  out.verdicts = reduce_over_ranks(comm, out.verdicts);
  return out;
}

std::vector<ProblemResult> reported_samples(const ProblemEvaluation& evaluation, Communicator& comm,
                                            const Judged& greedy) {
  const std::vector<Example>& problems = problems_of(evaluation);
  const size_t count = std::min<size_t>(kReportedSamples, problems.size());
  std::vector<std::string> texts(3 * count);
  for (size_t k = 0; k < greedy.trajectories.size(); ++k)
    if (const auto i = static_cast<size_t>(greedy.trajectories[k].group); i < count) {
      texts[3 * i] = greedy.prompts[k].prompt;
      texts[3 * i + 1] = greedy.prompts[k].answer;
      texts[3 * i + 2] = greedy.trajectories[k].text;
    }
  texts = gather_texts(comm, texts);
  std::vector<ProblemResult> out;
  for (size_t i = 0; i < count; ++i) {
    out.push_back({texts[3 * i], texts[3 * i + 1], texts[3 * i + 2], {}});
    if (!std::isnan(greedy.verdicts[i])) out.back().correct = greedy.verdicts[i] == 1;
  }
  return out;
}

// Adds the mean length of completions, the fractions that are truncated, and how many have failed.
// `prefix`: of the names.
void add_lengths(const Judged& judged, Communicator& comm, const std::string& prefix,
                 Metrics& out) {
  double tokens = 0, at_length = 0, at_context = 0;
  for (const Trajectory& t : judged.trajectories) {
    tokens += static_cast<double>(t.completion_length());
    at_length += t.stop_reason == StopReason::kLength;
    at_context += t.stop_reason == StopReason::kContext;
  }
  reduce_in_place(comm, {&tokens, &at_length, &at_context});
  const auto count = static_cast<double>(judged.verdicts.size());
  out.add(prefix + "mean_length", tokens / count);
  out.add(prefix + "clipped_ratio", at_length / count);
  out.add(prefix + "context_ratio", at_context / count);
  out.add(prefix + "failed", judged.failed);
}

// maj@k of every problem, on every rank.
std::vector<double> majorities(const ProblemEvaluation& evaluation, const Judged& sampled,
                               Communicator& comm, int64_t k) {
  const auto n = static_cast<size_t>(evaluation.config.eval.num_samples);
  std::vector<double> out(sampled.verdicts.size() / n, 0);
  for (size_t begin = 0; begin < sampled.trajectories.size(); begin += n) {
    std::vector<std::string> answers;
    for (const Trajectory& t : std::span(sampled.trajectories).subspan(begin, n))
      answers.push_back(evaluation.correct.answer ? evaluation.correct.answer(t.text) : t.text);
    const auto problem = static_cast<size_t>(sampled.trajectories[begin].group);
    out[problem] = majority_at_k(answers, std::span(sampled.verdicts).subspan(problem * n, n), k);
  }
  // One rank has each value and the others 0, so the sums are exact.
  return reduce_over_ranks(comm, out);
}

// Adds pass@k and maj@k to `scores`, their standard errors and the samples' lengths to `errors`.
void add_sampled(const ProblemEvaluation& evaluation, const Judged& sampled, Communicator& comm,
                 Metrics& scores, Metrics& errors) {
  const EvalConfig& eval = evaluation.config.eval;
  const auto add = [&](const std::string& name, std::span<const double> of_problems) {
    const MeanScore score = mean_score(of_problems);
    scores.add(name, score.mean);
    errors.add(name + "_stderr", score.error);
  };
  for (const int64_t k : eval.k)
    add(str("sampled_pass@", k), pass_at_k_of_prompts(sampled.verdicts, eval.num_samples, k));
  for (const int64_t k : eval.k) add(str("maj@", k), majorities(evaluation, sampled, comm, k));
  add_lengths(sampled, comm, "eval/sampled_", errors);
}

// kYes: the most likely token or label of each target is compared with it.
enum class Accuracy : bool { kNo, kYes };

// Sets the sum of each sequence's losses, from `loss` on, and its number of right targets, from
// `right` on, to the bit for any micro batches. Returns false if it was stopped.
bool sum_losses(const Scoring& scoring, std::span<const TokenSequence> sequences,
                int64_t micro_batch_tokens, Accuracy accuracy, double* loss, double* right) {
  NoGradGuard no_grad;
  const Transformer& model = scoring.model;
  std::fill_n(loss, sequences.size(), 0);
  std::fill_n(right, sequences.size(), 0);
  const std::vector<size_t> begins = split_micro_batches(sequences, micro_batch_tokens);
  for (size_t b = 0; b + 1 < begins.size(); ++b) {
    if (scoring.stop != nullptr && *scoring.stop) return false;
    const PackedBatch packed = pack(sequences.subspan(begins[b], begins[b + 1] - begins[b])),
                      batch = model.to_device(packed);
    const Variable hidden = model.hidden_at_targets(batch, {.adapters = scoring.adapters});
    const auto logprobs =
        token_log_probs(hidden, model.head(), batch.targets).logprob.value().to_vector<double>();
    std::vector<int32_t> likely(logprobs.size(), -1);
    if (accuracy == Accuracy::kYes)
      likely = most_likely(hidden.value(), model.head()).to_vector<int32_t>();
    const auto segments = packed.segments.to_vector<int32_t>(),
               targets = packed.targets.to_vector<int32_t>();
    for (size_t i = 0; i < targets.size(); ++i) {
      const size_t s = begins[b] + static_cast<size_t>(segments[i]);
      loss[s] -= logprobs[i];
      right[s] += likely[i] == targets[i];
    }
  }
  return true;
}

// By sequence, on every rank.
struct SequenceScores {
  std::vector<double> losses, right, targets;  // targets: their number
  // Means over the targets; NaN: there are none.
  double loss() const { return sum(losses) / sum(targets); }
  double accuracy() const { return sum(right) / sum(targets); }

 private:
  static double sum(const std::vector<double>& values) {
    return std::accumulate(values.begin(), values.end(), 0.0);
  }
};

// Scores of `count` groups of `size` sequences, which make(i, out) makes. Where memory runs out,
// this rank continues with smaller micro batches.
using MakeSequences = std::function<void(int64_t i, std::span<TokenSequence> out)>;
SequenceScores score_sequences(const Scoring& scoring, int64_t count, int64_t size,
                               const MakeSequences& make, Accuracy accuracy, Communicator& comm) {
  const RankShard shard = shard_of(count, comm.rank(), comm.size());
  // Nonzero on one rank only, so sums over the ranks are exact.
  SequenceScores out;
  out.losses = out.right = out.targets = std::vector<double>(static_cast<size_t>(count * size));
  int64_t micro_batch_tokens = scoring.micro_batch_tokens;
  bool stopped = false;
  // A part at a time, of which images may take much memory.
  constexpr int64_t kPart = 1024;
  for (int64_t begin = shard.begin; begin < shard.end && !stopped; begin += kPart) {
    const int64_t n = std::min(kPart, shard.end - begin);
    std::vector<TokenSequence> sequences(static_cast<size_t>(n * size));
    parallel_try(n, 1, [&](int64_t i) {
      make(begin + i,
           std::span(sequences).subspan(static_cast<size_t>(i * size), static_cast<size_t>(size)));
    });
    std::ranges::transform(sequences, out.targets.begin() + begin * size,
                           [](const auto& s) { return static_cast<double>(s.num_targets()); });
    for (;; micro_batch_tokens /= 2) try {
        stopped = !sum_losses(scoring, sequences, micro_batch_tokens, accuracy,
                              out.losses.data() + begin * size, out.right.data() + begin * size);
        break;
      } catch (const OutOfMemoryError&) {
        if (micro_batch_tokens <= 1) throw;
        allocator(scoring.model.device()).release_cached();
      }
  }
  check_stopped(comm, stopped);
  for (auto* values : {&out.losses, &out.right, &out.targets})
    *values = reduce_over_ranks(comm, *values);
  return out;
}

SequenceScores score_each(const Scoring& scoring, int64_t count,
                          const std::function<TokenSequence(int64_t)>& sequence, Accuracy accuracy,
                          Communicator& comm) {
  return score_sequences(
      scoring, count, 1, [&](int64_t i, std::span<TokenSequence> out) { out[0] = sequence(i); },
      accuracy, comm);
}

// The number of windows of `length` of `total` tokens that are evaluated, of at most `max_tokens`
// tokens (0: no limit), and the first token of each.
struct EvaluatedWindows {
  int64_t length, all, count;
  EvaluatedWindows(int64_t total, int64_t window, int64_t max_tokens)
      : length(window),
        all(ceil_div(total, window)),
        count(max_tokens == 0
                  ? all
                  : std::clamp<int64_t>(max_tokens / window, std::min<int64_t>(1, all), all)) {}
  int64_t begin(int64_t i) const {
    // i * all / count without the product, which may overflow.
    return (all / count * i + all % count * i / count) * length;
  }
};

// The data of a set alone: its lines are read by the run's templates unless it has its own.
DataConfig set_data(const DataConfig& run, const EvalSetConfig& set) {
  DataConfig out = run;
  out.task = out.jsonl.detected = out.jsonl.solution = "";
  out.fingerprint = set.fingerprint;
  out.text = out.eval_text = out.jsonl.eval_path = out.jsonl.split_by = {};
  out.weights = {};
  out.curriculum = Curriculum::kNone;
  out.jsonl.path = {set.path};
  out.jsonl.limit = 0;
  out.jsonl.held_out_fraction = 1;
  if (!set.answer.empty()) out.jsonl.answer = set.answer;
  if (set.prompt.empty()) return out;
  out.chat = run.is_chat();
  out.jsonl.prompt = set.prompt;
  out.jsonl.messages = out.jsonl.completion = "";
  return out;
}

}  // namespace

EvalConfig EvalConfig::options_of(const EvalSetConfig& set) const {
  EvalConfig out = *this;
  if (set.temperature) out.temperature = set.temperature;
  if (set.top_p) out.top_p = set.top_p;
  if (set.max_completion_length) out.max_completion_length = set.max_completion_length;
  out.num_samples = set.num_samples.value_or(num_samples);
  if (!set.k.empty()) out.k = set.k;
  if (!set.correct.reward.empty()) out.correct = set.correct;
  return out;
}

Correctness correctness_of(const CorrectConfig& config, const std::vector<RewardConfig>& rewards,
                           const Task* task, bool judges) {
  if (!judges && config.reward.empty() && rewards.size() > 1) return {};
  RewardConfig chosen;
  std::string name;
  if (config.reward.empty() && task != nullptr) {
    name = chosen.name = "task";
  } else if (config.reward.empty() && rewards.empty()) {
    name = chosen.name = "exact_match";
  } else {
    const std::vector<std::string> names =
        rewards.empty() ? std::vector<std::string>{} : RewardSet(rewards, task).names();
    const size_t index = chosen_reward(config, names);
    chosen = rewards[index];
    name = names[index];
  }
  return {name, config.threshold, make_reward(chosen, task),
          is_external(chosen) ? std::make_shared<ExternalReward>(chosen) : nullptr,
          make_answer(chosen)};
}

double held_out_loss(const ProblemEvaluation& evaluation, Communicator& comm) {
  const std::vector<Example>& problems = problems_of(evaluation);
  const auto sequence = [&](int64_t i) {
    return supervised_sequence(problems[static_cast<size_t>(i)], *evaluation.data.tokenizer,
                               evaluation.engine.model().config().context,
                               evaluation.config.data.too_long);
  };
  return score_each({.model = evaluation.engine.model(),
                     .micro_batch_tokens = evaluation.config.batch.micro_batch(),
                     .stop = evaluation.stop},
                    std::ssize(problems), sequence, Accuracy::kNo, comm)
      .loss();
}

ProblemScores evaluate_problems(const ProblemEvaluation& evaluation, Communicator& comm) {
  const EvalConfig& eval = evaluation.config.eval;
  ProblemScores scores;
  Metrics sampled_errors;
  const Judged greedy = sample_and_judge(evaluation, comm, 0, 1);
  const MeanScore pass = mean_score(greedy.verdicts);
  scores.metrics.add("pass@1", pass.mean);
  scores.samples = reported_samples(evaluation, comm, greedy);
  scores.pass_rates = greedy.verdicts;
  if (eval.num_samples > 0) {
    const double of_run = evaluation.config.sampling.temperature;
    const double temperature = eval.temperature.value_or(of_run > 0 ? of_run : 1);
    const Judged sampled = sample_and_judge(evaluation, comm, temperature, eval.num_samples);
    add_sampled(evaluation, sampled, comm, scores.metrics, sampled_errors);
    const auto n = static_cast<size_t>(eval.num_samples);
    for (size_t i = 0; i < scores.pass_rates.size(); ++i)
      scores.pass_rates[i] = mean_score(std::span(sampled.verdicts).subspan(i * n, n)).mean;
  }
  if (evaluation.config.batch.trainer == TrainerType::kSft)
    scores.metrics.add("val_loss", held_out_loss(evaluation, comm));
  scores.metrics.add("pass@1_stderr", pass.error);
  const auto judged =
      std::ranges::count_if(greedy.verdicts, [](double verdict) { return !std::isnan(verdict); });
  scores.metrics.add("problems", static_cast<double>(judged));
  add_lengths(greedy, comm, "eval/", scores.metrics);
  for (const auto& [name, value] : sampled_errors) scores.metrics.add(name, value);
  return scores;
}

double failed_count(const Metrics& metrics) {
  return metrics.find("eval/failed").value_or(0) + metrics.find("eval/sampled_failed").value_or(0);
}

EvalSet load_eval_set(const EvalSetSource& source, const EvalSetConfig& set, const std::string& key,
                      Dataset& data, int64_t context, ContextLimit limit) {
  const DataConfig own = set_data(source.data.data, set);
  BatchConfig batch = source.data.batch;
  batch.trainer = TrainerType::kGrpo;  // prompts are read, solutions are not
  const EvalConfig eval = source.eval.options_of(set);
  const DataSections sections{.data = own,
                              .batch = batch,
                              .seed = source.data.seed,
                              .max_completion_length = eval.max_completion_length.value_or(
                                  source.data.max_completion_length),
                              .fingerprint_key = key + ".fingerprint"};
  Dataset loaded = load_dataset(sections, std::move(data.tokenizer), DataParts::kHeldOut);
  EvalSet out{.name = set.name, .eval = eval, .correct = source.correct};
  out.too_long = check_held_out(sections, loaded, context, limit).too_long;
  out.problems = std::move(loaded.held_out);
  out.fingerprint = loaded.fingerprint;
  data.tokenizer = std::move(loaded.tokenizer);
  return out;
}

std::vector<EvalSet> load_eval_sets(const EvalSetSource& source, Dataset& data, int64_t context,
                                    ContextLimit limit) {
  std::vector<EvalSet> out;
  for (const EvalSetConfig& set : source.eval.sets) {
    const std::string key = str("eval.sets[", out.size(), "]");
    with_path(key + ".path", [&] {
      out.push_back(
          load_eval_set(source, set, str("eval.sets.", out.size()), data, context, limit));
    });
    with_path(key, [&] {
      if (!set.correct.reward.empty())
        out.back().correct = correctness_of(set.correct, source.rewards, data.task);
    });
  }
  return out;
}

ProblemScores evaluate_set(const EvalSet& set, const ProblemEvaluation& run, Communicator& comm) {
  BatchConfig batch = run.config.batch;
  batch.trainer = TrainerType::kGrpo;  // has no loss
  return evaluate_problems({.engine = run.engine,
                            .data = run.data,
                            .correct = set.correct,
                            .config = {set.eval, batch, run.config.data, run.config.sampling,
                                       run.config.seed ^ checksum(set.name)},
                            .step = run.step,
                            .stop = run.stop,
                            .problems = &set.problems,
                            .dialogue = run.dialogue,
                            .set = set.name},
                           comm);
}

std::string set_metric_name(const std::string& set, const std::string& metric) {
  constexpr std::string_view kPrefix = "eval/";
  return str(set, "/", metric.starts_with(kPrefix) ? metric.substr(kPrefix.size()) : metric);
}

double evaluate_text(const Transformer& model, const TokenStream& tokens, int64_t max_tokens,
                     int64_t micro_batch_tokens, Communicator& comm,
                     const std::atomic<bool>* stop) {
  const int64_t context = model.config().context, total = tokens.size() - 1;
  if (total < 1) return std::nan("");
  const EvaluatedWindows windows(total, context, max_tokens);
  const auto window = [&](int64_t i) {
    const int64_t begin = windows.begin(i), n = std::min(context, total - begin) + 1;
    return TokenSequence{.tokens = tokens.read(begin, n),
                         .loss_mask = std::vector<uint8_t>(static_cast<size_t>(n), 1)};
  };
  const Scoring scoring{.model = model, .micro_batch_tokens = micro_batch_tokens, .stop = stop};
  return score_each(scoring, windows.count, window, Accuracy::kNo, comm).loss();
}

std::vector<AnswerLogProbs> pair_log_probs(const Scoring& scoring, int64_t count,
                                           const GetPair& pair, Communicator& comm) {
  const SequenceScores scores = score_sequences(
      scoring, count, 2,
      [&](int64_t i, std::span<TokenSequence> out) { std::ranges::move(pair(i), out.begin()); },
      Accuracy::kNo, comm);
  std::vector<AnswerLogProbs> out;
  for (size_t i = 0; i < scores.losses.size(); ++i)
    out.push_back({.policy = -scores.losses[i], .tokens = scores.targets[i]});
  return out;
}

Metrics evaluate_targets(const TargetEvaluation& evaluation, Communicator& comm) {
  const auto& [model, data, config, masking, micro_batch_tokens, stop] = evaluation;
  const ModelConfig& c = model.config();
  const bool classes = config.batch.trainer == TrainerType::kClassify;
  if (config.batch.trainer == TrainerType::kPretrain) {
    if (data.held_out_text.size() < 2) return {};
    return {{"val_loss", evaluate_text(model, data.held_out_text, config.eval.tokens,
                                       micro_batch_tokens, comm, stop)}};
  }
  const auto score = [&](int64_t count, const std::function<TokenSequence(int64_t)>& sequence) {
    return score_each({.model = model, .micro_batch_tokens = micro_batch_tokens, .stop = stop},
                      count, sequence, Accuracy::kYes, comm);
  };
  SequenceScores scores;
  if (classes) {
    const ClassReader reader(
        {*data.tokenizer, c.labels, c.context, c.image_size, c.channels, c.token_types},
        Augment::kNone, config.seed);
    scores = score(std::ssize(data.held_out), [&](int64_t i) {
      return reader.read(data.held_out[static_cast<size_t>(i)], -1, i);
    });
  } else {
    const TokenStream& text = data.held_out_text;
    const EvaluatedWindows windows(text.size(),
                                   window_length(TrainerType::kMlm, *data.tokenizer, c.context),
                                   config.eval.tokens);
    const Masking mask(*data.tokenizer, masking, config.seed);
    scores = score(windows.count, [&](int64_t i) {
      const int64_t begin = windows.begin(i);
      return masked_sequence(text.read(begin, std::min(windows.length, text.size() - begin)),
                             *data.tokenizer, mask, -1, i);
    });
  }
  if (std::isnan(scores.loss())) return {};
  Metrics out;
  out.add("accuracy", scores.accuracy());
  if (classes) out.add("accuracy_stderr", mean_score(scores.right).error);
  out.add("val_loss", scores.loss());
  return out;
}

}  // namespace cohort
