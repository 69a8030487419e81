#include "trainers/grpo_step.h"

#include <algorithm>
#include <cmath>

#include "core/log.h"
#include "core/progress.h"
#include "core/rng.h"
#include "kernels/policy_token.h"
#include "trainers/across_ranks.h"

namespace cohort {
namespace {

// The purpose of rng_stream() for shuffled advantages.
constexpr uint64_t kAblationPurpose = 7;
// Maximum fraction of a step's completions for which commands may fail.
constexpr double kMaxFailedFraction = 0.05;

// Sets one column of all micro batches to the log-probs under `model`.
void set_log_probs(std::vector<Minibatch>& minibatches, Tensor PolicyBatch::*column,
                   const Transformer& model, double temperature) {
  NoGradGuard no_grad;
  for (Minibatch& minibatch : minibatches)
    for (PolicyBatch& batch : minibatch)
      batch.*column = policy_log_probs(model, batch, temperature).logprob.value();
}

// max |ratio - 1| of `model` to the log-probs that were recorded when this rank's tokens were
// sampled; infinite where one is NaN.
double ratio_deviation(std::span<const Minibatch> minibatches, const Transformer& model,
                       double temperature) {
  NoGradGuard no_grad;
  double largest = 0;
  for (const Minibatch& minibatch : minibatches)
    for (const PolicyBatch& batch : minibatch) {
      const Tensor now = policy_log_probs(model, batch, temperature).logprob.value();
      const auto new_values = now.to_vector<double>(),
                 old_values = batch.old_logprob.to_vector<double>();
      for (size_t i = 0; i < new_values.size(); ++i) {
        const double deviation = std::abs(std::expm1(new_values[i] - old_values[i]));
        largest = std::isnan(deviation) ? HUGE_VAL : std::max(largest, deviation);
      }
    }
  return largest;
}

// Runs `work` on every rank. If it throws NonFiniteError on one of them, all throw.
void on_all_ranks(Communicator& comm, const std::function<void()>& work) {
  std::optional<NonFiniteError> error;
  try {
    work();
  } catch (const NonFiniteError& e) {
    error = e;
  }
  double failed_ranks = error ? 1 : 0;
  reduce_in_place(comm, {&failed_ranks});
  if (failed_ranks == 0) return;
  throw error ? *error : NonFiniteError("another rank's logits hold NaN or infinity");
}

// Number of completions of the step to which a reward applies, over all ranks.
int64_t count_rewarded(Communicator& comm, const RewardSet::Scores& scores) {
  double count = 0;
  for (const double reward : scores.total) count += !std::isnan(reward);
  reduce_in_place(comm, {&count});
  return static_cast<int64_t>(count);
}

// Throws Error on all ranks if commands have failed for too many completions.
void check_failed(Communicator& comm, const RewardSet& rewards, const RewardSet::Scores& scores,
                  const GrpoSections& config) {
  double failed = 0;
  std::string error;
  for (size_t k = 0; k < scores.failed.size(); ++k) {
    const int64_t count = scores.failed[k].value_or(0);
    if (count == 0) continue;
    failed += static_cast<double>(count);
    const std::string message = str("reward ", rewards.names()[k], ": no value for ", count,
                                    " completions; the first: ", scores.first_error[k]);
    logging::warn(message, "; the step cannot be reproduced");
    error = message;
  }
  reduce_in_place(comm, {&failed});
  if (failed <= kMaxFailedFraction * static_cast<double>(config.batch.completions_per_step()))
    return;
  throw Error(str(first_text(comm, error),
                  "; hint: the programs' own messages are in rewards.log of the run"));
}

// Gathers `values`, one per completion of a rank, from all ranks in the order of the prompts.
std::vector<double> gather_values(Communicator& comm, std::span<const Trajectory> completions,
                                  std::span<const double> values, const GrpoSections& config) {
  std::vector<double> all(static_cast<size_t>(config.batch.completions_per_step()));
  for (size_t i = 0; i < values.size(); ++i)
    all[static_cast<size_t>(completions[i].index)] = values[i];
  return reduce_over_ranks(comm, all);
}

// True if a sequence can change the update. Without a KL term a zero advantage gives an exactly
// zero gradient.
bool has_gradient(const PolicySequence& sequence, double beta) {
  return sequence.num_targets() > 0 && (beta > 0 || sequence.advantage != 0);
}

// Sums the statistics that each micro batch of one update has left on the device.
kernels::PolicyLossStats total_of(const Tensor& stats) {
  const Tensor rows = stats.to(Device{});
  kernels::PolicyLossStats total;
  for (int64_t i = 0; i < rows.dim(0); ++i)
    add(total, kernels::PolicyLossStats::from(rows.select(0, i)));
  return total;
}

}  // namespace

std::vector<int64_t> shard_prompts(const Communicator& comm, const GrpoSections& config,
                                   int64_t step) {
  const int64_t count = config.batch.prompts_per_step, parts = config.grpo.num_minibatches;
  std::vector<int64_t> out;
  for (int64_t m = 0; m < parts; ++m) {
    const int64_t begin = count * m / parts, end = count * (m + 1) / parts;
    const RankShard range = shard_of(end - begin, comm.rank(), comm.size(), step * parts + m);
    for (int64_t i = range.begin; i < range.end; ++i) out.push_back(begin + i);
  }
  return out;
}

GrpoStepResult grpo_step(const GrpoStep& in) {
  const GrpoSections& config = in.config;
  GrpoStepResult out;
  auto& [trajectories, scores, advantages] = out.rollouts;
  Stopwatch clock;
  in.learner.check_weights();
  Engine& engine = in.sampler.engine();
  engine.reset_stats();
  begin_activity("sampling completions");
  const auto submit = [&](const Trajectory& trajectory) {
    const auto prompt =
        std::find(in.indices.begin(), in.indices.end(), trajectory.group) - in.indices.begin();
    in.rewards.submit(in.prompts[static_cast<size_t>(prompt)], trajectory, in.step);
  };
  on_all_ranks(in.comm, [&] {
    trajectories = in.sampler.sample(in.prompts, config.batch.num_generations,
                                     {.seed = config.seed,
                                      .step = in.step,
                                      .prompt_indices = {in.indices.begin(), in.indices.end()}},
                                     {.on_finished = submit});
  });
  const double sampling_time = clock.lap("sampling");
  begin_activity("waiting for rewards");
  scores = in.rewards.score(in.prompts, trajectories, in.step);
  check_failed(in.comm, in.rewards, scores, config);
  const bool by_batch = config.grpo.scale_rewards == AdvantageScale::kBatch;
  advantages = group_advantages(
      scores.total, config.batch.num_generations, config.grpo.scale_rewards,
      by_batch ? reward_std(gather_values(in.comm, trajectories, scores.total, config)) : 0);
  out.rewarded_count = count_rewarded(in.comm, scores);
  const double rewards_time = clock.lap("rewards");
  begin_activity("updating the weights");
  UpdateSums updates;
  double packing_time = 0;
  if (out.rewarded_count > 0) {
    std::vector<Minibatch> minibatches = pack_minibatches(
        in.comm, in.learner.model(), out.rollouts,
        config.grpo.shuffle_advantages ? shuffled_advantages(in.comm, out.rollouts, config, in.step)
                                       : advantages,
        config);
    packing_time = clock.lap("packing");
    if (in.reference != nullptr)
      set_log_probs(minibatches, &PolicyBatch::ref_logprob, *in.reference,
                    config.sampling.temperature);
    updates = update_policy(in.comm, in.learner, minibatches, config, in.learning_rate, in.step);
  }
  const double update_time = clock.lap("update");
  MetricSums sums =
      grpo_metrics(out.rollouts, in.rewards.names(), updates, config, in.learning_rate);
  add_rollout_metrics(sums, engine, sampling_time);
  sums.add_local("time/sampling", sampling_time);
  sums.add_local("time/rewards", rewards_time);
  sums.add_local("time/packing", packing_time);
  sums.add_local("time/update", update_time);
  out.metrics = sums.reduce(in.comm);
  out.metrics.add("update/tokens_per_second", out.metrics.at("num_tokens") / update_time);
  return out;
}

std::vector<double> shuffled_advantages(Communicator& comm, const ScoredRollouts& rollouts,
                                        const GrpoSections& config, int64_t step) {
  const std::vector<Trajectory>& completions = rollouts.trajectories;
  std::vector<double> all = gather_values(comm, completions, rollouts.advantages, config);
  Rng rng(config.seed, rng_stream(kAblationPurpose, static_cast<uint64_t>(step)));
  for (auto i = static_cast<int64_t>(all.size()) - 1; i > 0; --i)
    std::swap(all[static_cast<size_t>(i)], all[static_cast<size_t>(rng.below(i + 1))]);
  std::vector<double> shuffled;
  for (const Trajectory& completion : completions)
    shuffled.push_back(all[static_cast<size_t>(completion.index)]);
  return shuffled;
}

std::vector<Minibatch> pack_minibatches(Communicator& comm, const Transformer& model,
                                        const ScoredRollouts& rollouts,
                                        std::span<const double> advantages,
                                        const GrpoSections& config) {
  const int64_t parts = config.grpo.num_minibatches;
  std::vector<Minibatch> out;
  size_t i = 0;
  for (int64_t m = 0; m < parts; ++m) {
    std::vector<PolicySequence> sequences;
    const int64_t end = config.batch.prompts_per_step * (m + 1) / parts;  // prompts of the step
    for (; i < rollouts.trajectories.size() && rollouts.trajectories[i].group < end; ++i) {
      if (std::isnan(rollouts.scores.total[i])) continue;
      const Trajectory& trajectory = rollouts.trajectories[i];
      PolicySequence& s = sequences.emplace_back(policy_sequence(trajectory, advantages[i]));
      // The prompt's last token is not part of the shared prefix: its target is the completion's
      // first.
      if (config.batch.num_generations > 1) {
        s.group = trajectory.group;
        s.prefix = trajectory.prompt_length - 1;
      }
      if (config.grpo.mask_truncated_completions && trajectory.truncated())
        s.loss_mask.assign(s.tokens.size(), 0);
    }
    StepTotals totals = count_totals(sequences);
    reduce_in_place(comm, {&totals.sequences, &totals.tokens});
    // No update at all: even with a zero gradient AdamW's decay and momentum would move the
    // weights.
    if (totals.tokens == 0) continue;
    std::erase_if(sequences, [&](const auto& s) { return !has_gradient(s, config.grpo.beta); });
    out.push_back(pack_policy(std::move(sequences),
                              {.loss_type = config.grpo.loss_type,
                               .totals = totals,
                               .max_completion_length = config.sampling.max_completion_length,
                               .micro_batch_tokens = config.batch.micro_batch(),
                               .dtype = accumulate_dtype(model.dtype())}));
    for (PolicyBatch& batch : out.back()) batch = to_device(batch, model);
  }
  return out;
}

UpdateSums update_policy(Communicator& comm, Learner& learner, std::vector<Minibatch>& minibatches,
                         const GrpoSections& config, double learning_rate, int64_t step) {
  const double temperature = config.sampling.temperature;
  Tensor stats;
  const auto update = [&](const Minibatch& minibatch, const std::function<bool()>& accept) {
    const auto count = static_cast<int64_t>(minibatch.size());
    stats = Tensor::empty({count, kernels::PolicyLossStats::kSize}, DType::kF64,
                          learner.model().device());
    const auto loss_of = [&](int64_t i) {
      const PolicyBatch& batch = minibatch[static_cast<size_t>(i)];
      const Transformer& model = learner.model();
      HeadLoss loss = grpo_loss(model.hidden_at_targets(batch, {.mode = Mode::kEval}), model.head(),
                                batch, config.grpo, temperature);
      stats.select(0, i).copy_(loss.stats);
      return loss;
    };
    return learner.update(count, loss_of, learning_rate, accept);
  };
  const std::function<bool()> is_on_policy = [&] {
    return total_of(stats).max_ratio_deviation == 0;
  };
  UpdateSums sums;
  const auto over_ranks = [&](double deviation) {
    reduce_in_place(comm, {&deviation}, Reduce::kMax);
    return deviation;
  };
  const auto correct_log_probs = [&](double deviation) {
    sums.ratio_deviation = deviation;
    set_log_probs(minibatches, &PolicyBatch::old_logprob, learner.model(), temperature);
    if (comm.rank() == 0)
      logging::warn(
          "the sampler's log-probs differ from the trainer's: max |ratio - 1| = ", deviation,
          " before the first update, which uses log-probs recomputed by the ", "trainer instead");
  };
  // The ratios of the first minibatch are known with its loss.
  const int64_t every = config.grpo.ratio_check_every;
  if (every > 0 && step % every == 0 && minibatches.size() > 1)
    if (const double deviation = over_ranks(
            ratio_deviation(std::span(minibatches).subspan(1), learner.model(), temperature));
        deviation != 0)
      correct_log_probs(deviation);
  for (int64_t iteration = 0; iteration < config.grpo.num_iterations; ++iteration)
    for (size_t m = 0; m < minibatches.size(); ++m) {
      const bool first = iteration == 0 && m == 0 && sums.ratio_deviation == 0;
      Learner::Update done = update(minibatches[m], first ? is_on_policy : nullptr);
      if (done.refused) {
        correct_log_probs(over_ranks(total_of(stats).max_ratio_deviation));
        done = update(minibatches[m], nullptr);
      }
      sums.add(done, total_of(stats));
    }
  return sums;
}

}  // namespace cohort
