#include "trainers/evaluate.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "config/visitor.h"
#include "core/allocator.h"
#include "core/log.h"
#include "core/sizes.h"
#include "kernels/head.h"
#include "trainers/across_ranks.h"
#include "trainers/sampling.h"

namespace cohort {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Index into `names` of the reward of eval.correct.
size_t chosen_reward(const CorrectConfig& config, const std::vector<std::string>& names) {
  const std::string list = join(names, ", ");
  if (config.reward.empty() && names.size() > 1)
    throw InputError(str("eval.correct.reward: there are ", names.size(), " rewards (", list,
                         ") and pass@1 needs one as its criterion; hint: "
                         "eval.correct.reward=",
                         names[0]));
  const auto it =
      config.reward.empty() ? names.begin() : std::find(names.begin(), names.end(), config.reward);
  if (it != names.end()) return static_cast<size_t>(it - names.begin());
  throw InputError(str("eval.correct.reward: no reward is called '", config.reward, "'; ",
                       list.empty() ? "there are none" : "the rewards are " + list,
                       did_you_mean(config.reward, names)));
}

// Completions of this rank's problems.
struct Judged {
  std::vector<Trajectory> trajectories;
  std::vector<double> verdicts;  // for all problems' samples, on every rank
};

// Collects a program's verdicts on the submitted completions.
void collect_verdicts(const Correctness& correct, std::vector<double>& verdicts) {
  int64_t failed = 0;
  std::string first;
  for (const auto& [index, result] : correct.command->collect()) {
    verdicts[static_cast<size_t>(index)] = correct.verdict(result.value);
    if (!result.error.empty() && failed++ == 0) first = result.error;
  }
  if (failed > 0)
    logging::warn("evaluation: reward ", correct.name, ": no value for ", failed,
                  " completions, which are left out; the first: ", first);
}

// Throws EvaluationStopped if a rank was stopped.
void check_stopped(Communicator& comm, bool stopped) {
  double any = stopped;
  reduce_in_place(comm, {&any}, Reduce::kMax);
  if (any > 0) throw EvaluationStopped("the evaluation was stopped");
}

Judged sample_and_judge(const ProblemEvaluation& evaluation, Communicator& comm, double temperature,
                        int64_t samples) {
  const std::vector<Example>& problems = evaluation.data.held_out;
  const auto count = static_cast<int64_t>(problems.size());
  const RankShard shard = shard_of(count, comm.rank(), comm.size());
  SamplingConfig sampling =
      sampling_for(evaluation.config.sampling, evaluation.config.data, *evaluation.data.tokenizer);
  sampling.temperature = temperature;
  SampleAddress address{.seed = evaluation.config.seed, .step = -1 - evaluation.step};
  address.prompt_indices.resize(static_cast<size_t>(shard.end - shard.begin));
  std::iota(address.prompt_indices.begin(), address.prompt_indices.end(), shard.begin);
  const auto input_of = [&](const Trajectory& t) {
    return RewardInput{problems[static_cast<size_t>(t.group)], t.text, t.index, evaluation.step};
  };
  const auto submit = [&](const Trajectory& t) {
    if (evaluation.correct.command != nullptr) evaluation.correct.command->submit(input_of(t));
  };
  const auto unless_stopped = [&](const Trajectory&) {
    if (evaluation.stop != nullptr && *evaluation.stop) throw EvaluationStopped("stopped");
    return true;
  };
  Judged out;
  bool stopped = false;
  try {
    out.trajectories =
        Sampler(evaluation.engine, *evaluation.data.tokenizer, sampling)
            .sample(std::span(problems).subspan(static_cast<size_t>(shard.begin),
                                                address.prompt_indices.size()),
                    samples, address, {.on_finished = submit, .on_token = unless_stopped});
  } catch (const EvaluationStopped&) {
    stopped = true;
  }
  check_stopped(comm, stopped);
  out.verdicts.assign(static_cast<size_t>(count * samples), 0);
  for (const Trajectory& t : out.trajectories)
    if (evaluation.correct.command == nullptr)
      out.verdicts[static_cast<size_t>(t.index)] = evaluation.correct.judge(input_of(t));
  if (evaluation.correct.command != nullptr) collect_verdicts(evaluation.correct, out.verdicts);
  // One rank has each verdict and the others 0, so the sums are exact; a NaN stays one.
  out.verdicts = reduce_over_ranks(comm, out.verdicts);
  return out;
}

std::vector<ProblemResult> reported_samples(const ProblemEvaluation& evaluation, Communicator& comm,
                                            const Judged& greedy) {
  const std::vector<Example>& problems = evaluation.data.held_out;
  std::vector<std::string> texts(std::min<size_t>(kReportedSamples, problems.size()));
  for (const Trajectory& t : greedy.trajectories)
    if (const auto index = static_cast<size_t>(t.group); index < texts.size())
      texts[index] = t.text;
  texts = gather_texts(comm, texts);
  std::vector<ProblemResult> out;
  for (size_t i = 0; i < texts.size(); ++i) {
    out.push_back({problems[i].prompt, problems[i].answer, texts[i], {}});
    if (!std::isnan(greedy.verdicts[i])) out.back().correct = greedy.verdicts[i] == 1;
  }
  return out;
}

// Adds the standard error of pass@1 and the lengths of the greedy completions.
void add_statistics(const Judged& greedy, Communicator& comm, Metrics& out) {
  double judged = 0, right = 0;
  for (const double verdict : greedy.verdicts) {
    judged += !std::isnan(verdict);
    right += verdict == 1;
  }
  double tokens = 0, at_length = 0, at_context = 0;
  for (const Trajectory& t : greedy.trajectories) {
    tokens += static_cast<double>(t.completion_length());
    at_length += t.stop_reason == StopReason::kLength;
    at_context += t.stop_reason == StopReason::kContext;
  }
  reduce_in_place(comm, {&tokens, &at_length, &at_context});
  const auto count = static_cast<double>(greedy.verdicts.size());
  const double pass_rate = right / judged;
  out.add("pass@1_stderr",
          judged > 1 ? std::sqrt(pass_rate * (1 - pass_rate) / (judged - 1)) : kNaN);
  out.add("problems", count);
  out.add("eval/mean_length", tokens / count);
  out.add("eval/clipped_ratio", at_length / count);
  out.add("eval/context_ratio", at_context / count);
}

struct SequenceLosses {
  std::vector<double> each;
  double tokens = 0;
  bool stopped = false;
};

// The sum of each sequence's token losses, to the bit for any micro batches.
SequenceLosses losses_of(const Transformer& model, std::span<const TokenSequence> sequences,
                         int64_t micro_batch_tokens, const std::atomic<bool>* stop) {
  NoGradGuard no_grad;
  SequenceLosses out{.each = std::vector<double>(sequences.size(), 0)};
  auto sequence_loss = out.each.begin();
  for (const PackedBatch& packed : pack_micro_batches(sequences, micro_batch_tokens)) {
    if ((out.stopped = stop != nullptr && *stop)) break;
    const PackedBatch batch = model.to_device(packed);
    const Variable hidden = model.hidden_at_targets(batch);
    const auto logprobs =
        token_log_probs(hidden, model.head(), batch.targets).logprob.value().to_vector<double>();
    const auto targets = packed.target_positions.to_vector<int32_t>();
    const auto begins = packed.cu_seqlens.to_vector<int32_t>();
    size_t i = 0;
    for (size_t s = 0; s + 1 < begins.size(); ++s, ++sequence_loss)
      for (; i < targets.size() && targets[i] < begins[s + 1]; ++i) *sequence_loss -= logprobs[i];
    out.tokens += static_cast<double>(batch.num_targets());
  }
  return out;
}

// Mean loss over the target tokens of `count` sequences; NaN if there are none. Where memory runs
// out, this rank continues with smaller micro batches.
double mean_loss(const Transformer& model, int64_t count,
                 const std::function<TokenSequence(int64_t)>& sequence, int64_t micro_batch_tokens,
                 Communicator& comm, const std::atomic<bool>* stop) {
  const RankShard shard = shard_of(count, comm.rank(), comm.size());
  std::vector<TokenSequence> sequences;
  for (int64_t i = shard.begin; i < shard.end; ++i) sequences.push_back(sequence(i));
  SequenceLosses mine;
  for (int64_t size = micro_batch_tokens;; size /= 2) try {
      mine = losses_of(model, sequences, size, stop);
      break;
    } catch (const OutOfMemoryError&) {
      if (size <= 1) throw;
      allocator(model.device()).release_cached();
    }
  check_stopped(comm, mine.stopped);
  reduce_in_place(comm, {&mine.tokens});
  // Nonzero on one rank only, so sums over the ranks are exact.
  std::vector<double> losses(static_cast<size_t>(count), 0);
  std::copy(mine.each.begin(), mine.each.end(), losses.begin() + shard.begin);
  double loss = 0;
  for (const double each : reduce_over_ranks(comm, losses)) loss += each;
  return mine.tokens > 0 ? loss / mine.tokens : kNaN;
}

}  // namespace

Correctness correctness_of(const CorrectConfig& config, const std::vector<RewardConfig>& rewards,
                           const Task* task) {
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
          chosen.name == "command" ? std::make_shared<CommandReward>(chosen) : nullptr};
}

ProblemScores evaluate_problems(const ProblemEvaluation& evaluation, Communicator& comm) {
  const EvalConfig& eval = evaluation.config.eval;
  ProblemScores scores;
  const Judged greedy = sample_and_judge(evaluation, comm, 0, 1);
  scores.metrics.add("pass@1", mean_pass_at_k(greedy.verdicts, 1, 1));
  scores.samples = reported_samples(evaluation, comm, greedy);
  scores.pass_rates = greedy.verdicts;
  if (eval.num_samples > 0) {
    const double temperature =
        evaluation.config.sampling.temperature > 0 ? evaluation.config.sampling.temperature : 1;
    const Judged sampled = sample_and_judge(evaluation, comm, temperature, eval.num_samples);
    for (const int64_t k : eval.k)
      scores.metrics.add(str("sampled_pass@", k),
                         mean_pass_at_k(sampled.verdicts, eval.num_samples, k));
    for (size_t i = 0; i < scores.pass_rates.size(); ++i) {
      const auto first = sampled.verdicts.begin() + static_cast<int64_t>(i) * eval.num_samples;
      scores.pass_rates[i] = std::accumulate(first, first + eval.num_samples, 0.0) /
                             static_cast<double>(eval.num_samples);
    }
  }
  if (evaluation.config.batch.trainer == TrainerType::kSft) {
    const auto sequence = [&](int64_t i) {
      return supervised_sequence(
          evaluation.data.held_out[static_cast<size_t>(i)], *evaluation.data.tokenizer,
          evaluation.engine.model().config().context, evaluation.config.data.too_long);
    };
    scores.metrics.add(
        "val_loss",
        mean_loss(evaluation.engine.model(), static_cast<int64_t>(evaluation.data.held_out.size()),
                  sequence, evaluation.config.batch.micro_batch(), comm, evaluation.stop));
  }
  add_statistics(greedy, comm, scores.metrics);
  return scores;
}

double evaluate_text(const Transformer& model, const TokenStream& tokens, int64_t max_tokens,
                     int64_t micro_batch_tokens, Communicator& comm,
                     const std::atomic<bool>* stop) {
  const int64_t context = model.config().context, total = tokens.size() - 1;
  const int64_t all = ceil_div(total, context), limit = max_tokens / context;
  const int64_t count = max_tokens == 0 ? all : std::clamp<int64_t>(limit, 1, all);
  const auto window = [&](int64_t i) {
    // i * all / count without the product, which may overflow.
    const int64_t index = all / count * i + all % count * i / count;
    const int64_t begin = index * context, n = std::min(context, total - begin) + 1;
    return TokenSequence{.tokens = tokens.read(begin, n),
                         .loss_mask = std::vector<uint8_t>(static_cast<size_t>(n), 1)};
  };
  return mean_loss(model, count, window, micro_batch_tokens, comm, stop);
}

}  // namespace cohort
