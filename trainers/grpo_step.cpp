#include "trainers/grpo_step.h"

#include <algorithm>
#include <cmath>

#include "core/log.h"
#include "core/progress.h"
#include "core/rng.h"
#include "kernels/elementwise.h"
#include "kernels/policy_token.h"
#include "trainers/across_ranks.h"

namespace cohort {
namespace {

// The purpose of rng_stream() for shuffled advantages.
constexpr uint64_t kAblationPurpose = 7;
// Maximum fraction of a step's completions for which commands may fail.
constexpr double kMaxFailedFraction = 0.05;

// Packs an update into micro batches of at most `tokens` tokens, unless they are already.
void repack(PolicyUpdate& update, int64_t tokens, const Transformer& model) {
  if (update.pack.micro_batch_tokens == tokens) return;
  unpack_log_probs(update.batches, update.sequences);  // some may have been recomputed
  PackPolicyDesc desc = update.pack;
  desc.micro_batch_tokens = tokens;
  Minibatch batches = pack_policy(update.sequences, desc);
  for (PolicyBatch& batch : batches) batch = to_device(batch, model);
  update.batches = std::move(batches);
  update.pack = desc;
}

// Calls Learner::within_memory() for work on `updates`.
void within_memory(Learner& learner, std::span<PolicyUpdate> updates, const GrpoSections& config,
                   const std::function<void()>& work) {
  const auto pack = [&](int64_t tokens) {
    int64_t largest = 0;
    for (PolicyUpdate& update : updates) {
      repack(update, tokens, learner.model());
      for (const PolicyBatch& batch : update.batches) largest = std::max(largest, batch.size());
    }
    return largest;
  };
  learner.within_memory(config.batch.micro_batch(), pack, work);
}

// While this lives, the model has the adapters `values`, unless they are nullptr.
class OtherAdapters : NonCopyable {
 public:
  OtherAdapters(Transformer& model, const std::vector<Tensor>* values) : model_(model) {
    if (values == nullptr) return;
    own_ = model.adapters();
    model.set_adapters(*values);
  }
  ~OtherAdapters() {
    if (!own_.empty()) model_.set_adapters(own_);
  }

 private:
  Transformer& model_;
  std::vector<Tensor> own_;
};

// Sets one column of all micro batches to the log-probs under `model`, within memory.
void set_log_probs(Communicator& comm, Learner& learner, std::span<PolicyUpdate> updates,
                   const GrpoSections& config, Tensor PolicyBatch::*column,
                   const ReferencePolicy& policy) {
  const auto set = [&] {
    NoGradGuard no_grad;
    const OtherAdapters adapters(learner.model(), policy.start);
    for (PolicyUpdate& update : updates)
      for (PolicyBatch& batch : update.batches)
        batch.*column =
            policy_log_probs(*policy.model, batch, config.sampling.temperature, policy.adapters)
                .logprob.value();
  };
  within_memory(learner, updates, config, [&] { on_all_ranks(comm, set); });
}

// The log of the ratio of each target under `model`: its log-prob less the recorded one.
std::vector<double> log_ratios(const PolicyBatch& batch, const Transformer& model,
                               double temperature) {
  NoGradGuard no_grad;
  std::vector<double> out =
      policy_log_probs(model, batch, temperature).logprob.value().to_vector<double>();
  const auto old_values = batch.old_logprob.to_vector<double>();
  for (size_t i = 0; i < out.size(); ++i) out[i] -= old_values[i];
  return out;
}

// max |ratio - 1| of `model` to the log-probs that were recorded when this rank's tokens were
// sampled; infinite where one is NaN.
double ratio_deviation(std::span<const PolicyUpdate> minibatches, const Transformer& model,
                       double temperature) {
  double largest = 0;
  for (const PolicyUpdate& minibatch : minibatches)
    for (const PolicyBatch& batch : minibatch.batches)
      for (const double log_ratio : log_ratios(batch, model, temperature)) {
        const double deviation = std::abs(std::expm1(log_ratio));
        largest = std::isnan(deviation) ? HUGE_VAL : std::max(largest, deviation);
      }
  return largest;
}

// Estimates KL(old policy, `model`) on the first micro batch of the update on this rank.
Moments kl_from_old(const PolicyUpdate& update, const Transformer& model, double temperature) {
  Moments kl;
  if (!update.batches.empty())
    for (const double log_ratio : log_ratios(update.batches[0], model, temperature))
      kl.add(kernels::k3(log_ratio).value);
  return kl;
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
                  "; hint: the programs' own messages are in workers.log of the run"));
}

// Gathers `values`, one per completion of a rank, from all ranks in the order of the prompts.
std::vector<double> gather_values(Communicator& comm, std::span<const Trajectory> completions,
                                  std::span<const double> values, const GrpoSections& config) {
  std::vector<double> all(static_cast<size_t>(config.batch.completions_per_step()));
  for (size_t i = 0; i < values.size(); ++i)
    all[static_cast<size_t>(completions[i].index)] = values[i];
  return reduce_over_ranks(comm, all);
}

// The tokens of each completion that count in the loss.
std::vector<double> loss_tokens(const ScoredRollouts& rollouts, const GrpoConfig& grpo) {
  std::vector<double> tokens;
  for (size_t i = 0; i < rollouts.trajectories.size(); ++i)
    tokens.push_back(static_cast<double>(
        count_loss_tokens(rollouts.trajectories[i], rollouts.scores.total[i], grpo)));
  return tokens;
}

// The entropy below which a token of the step has no surrogate (top_entropy_quantile): a quantile
// over the tokens of all ranks that count in the loss. Beyond the 20/80 Rule, Wang et al. 2025.
double entropy_threshold(Communicator& comm, const ScoredRollouts& rollouts,
                         const GrpoSections& config) {
  const std::vector<double> own = loss_tokens(rollouts, config.grpo),
                            tokens = gather_values(comm, rollouts.trajectories, own, config);
  std::vector<size_t> begins{0};
  for (const double count : tokens) begins.push_back(begins.back() + static_cast<size_t>(count));
  std::vector<double> entropies(begins.back());
  for (size_t i = 0; i < own.size(); ++i) {
    const Trajectory& t = rollouts.trajectories[i];
    size_t at = begins[static_cast<size_t>(t.index)];
    for (size_t k = 0; own[i] > 0 && k < t.tokens.size(); ++k)
      if (t.loss_mask[k]) entropies[at++] = t.entropies[k];
  }
  return quantile(reduce_over_ranks(comm, entropies), 1 - config.grpo.top_entropy_quantile);
}

// The advantages of a rank's completions relative to their groups.
std::vector<double> relative_advantages(const GrpoStep& in, const ScoredRollouts& rollouts,
                                        std::span<const double> rewards) {
  const GrpoConfig& grpo = in.config.grpo;
  const auto advantages_of = [&](std::span<const double> values) {
    double batch_std = 0;
    if (grpo.scale_rewards == AdvantageScale::kBatch)
      batch_std = reward_std(gather_values(in.comm, rollouts.trajectories, values, in.config));
    return group_advantages(values, in.config.batch.num_generations, grpo.scale_rewards, batch_std);
  };
  if (grpo.multi_objective_aggregation == RewardAggregation::kSumThenNormalize)
    return advantages_of(rewards);
  std::vector<std::vector<double>> each;
  for (const std::vector<double>& values : rollouts.scores.each)
    each.push_back(advantages_of(values));
  std::vector<double> out, of_rewards(each.size());
  for (size_t i = 0; i < rewards.size(); ++i) {
    for (size_t k = 0; k < each.size(); ++k) of_rewards[k] = each[k][i];
    out.push_back(weighted_sum(in.rewards.weights(), of_rewards));
  }
  return out;
}

// The advantages of a rank's completions from the relative ones, with statistics over those of all
// ranks in the order of the prompts.
std::vector<double> step_advantages(const GrpoStep& in, const ScoredRollouts& rollouts,
                                    std::vector<double> out) {
  const GrpoSections& config = in.config;
  const GrpoConfig& grpo = config.grpo;
  const std::span<const Trajectory> completions = rollouts.trajectories;
  const auto gather = [&](std::span<const double> values) {
    return gather_values(in.comm, completions, values, config);
  };
  const auto over_step = [&](std::vector<double>& own, const auto& change) {
    std::vector<double> all = gather(own);
    change(all);
    for (size_t i = 0; i < own.size(); ++i) own[i] = all[static_cast<size_t>(completions[i].index)];
  };
  if (grpo.multi_objective_aggregation == RewardAggregation::kNormalizeThenSum) {
    const std::vector<double> totals = gather(rollouts.scores.total);
    std::vector<bool> rewarded;
    for (const double total : totals) rewarded.push_back(!std::isnan(total));
    over_step(out, [&](std::vector<double>& all) { standardize(all, rewarded); });
  }
  if (grpo.whiten_advantages) {
    const std::vector<double> tokens = gather(loss_tokens(rollouts, grpo));
    over_step(out, [&](std::vector<double>& all) { whiten_advantages(all, tokens); });
  }
  if (grpo.advantage_clip)
    for (double& a : out) a = std::clamp(a, -*grpo.advantage_clip, *grpo.advantage_clip);
  return out;
}

// True if a sequence can change the update. Without a KL term and an entropy bonus a zero advantage
// gives an exactly zero gradient.
bool has_gradient(const PolicySequence& sequence, const GrpoConfig& config) {
  return sequence.num_targets() > 0 && (config.needs_all_completions() || sequence.advantage != 0);
}

// Sums the statistics that each micro batch of one update has left on the device.
kernels::PolicyLossStats total_of(const Tensor& stats) {
  if (!stats.defined()) return {};  // no micro batch
  const Tensor rows = stats.to(Device{});
  kernels::PolicyLossStats total;
  for (int64_t i = 0; i < rows.dim(0); ++i)
    add(total, kernels::PolicyLossStats::from(rows.select(0, i)));
  return total;
}

// One optimiser update on a minibatch; sets `stats` to its sums. `on_policy`: the weights are those
// that sampled. `accept`: see Learner::update().
Learner::Update update_on(Learner& learner, PolicyUpdate& minibatch, const GrpoSections& config,
                          bool on_policy, double learning_rate, kernels::PolicyLossStats& stats,
                          const std::function<bool()>& accept) {
  Learner::Update done;
  within_memory(learner, {&minibatch, 1}, config, [&] {
    const auto count = static_cast<int64_t>(minibatch.batches.size());
    Tensor rows;
    const auto loss_of = [&](int64_t i) {
      const PolicyBatch& batch = minibatch.batches[static_cast<size_t>(i)];
      const Transformer& model = learner.model();
      if (i == 0)
        rows = Tensor::empty({count, kernels::PolicyLossStats::kSize}, DType::kF64, model.device());
      HeadLoss loss = grpo_loss(model.hidden_at_targets(batch, {.mode = Mode::kEval}), model.head(),
                                batch, config.grpo, config.sampling.temperature, on_policy);
      rows.select(0, i).copy_(loss.stats);
      return loss;
    };
    done = learner.update(count, loss_of, learning_rate, [&] {
      stats = total_of(rows);
      return accept == nullptr || accept();
    });
  });
  return done;
}

// Seconds of a step on this rank.
struct StepTimes {
  double sampling = 0, rewards = 0;
};

// Samples and scores completions of this rank's prompts, whose indices address the random numbers.
ScoredRollouts sample_and_score(const GrpoStep& in, std::span<const Example> prompts,
                                std::span<const int64_t> indices, StepTimes& times) {
  const GrpoSections& config = in.config;
  const bool has_scores = in.journal != nullptr && in.journal->has_scores();
  ScoredRollouts out;
  Stopwatch clock;
  begin_activity("sampling completions");
  const auto submit = [&](const Trajectory& trajectory) {
    if (has_scores) return;
    const auto prompt = std::find(indices.begin(), indices.end(), trajectory.group);
    in.rewards.submit(prompts[static_cast<size_t>(prompt - indices.begin())], trajectory, in.step);
  };
  on_all_ranks(in.comm, [&] {
    out.trajectories = in.sampler.sample(
        prompts, config.batch.num_generations,
        {.seed = config.seed, .step = in.step, .prompt_indices = {indices.begin(), indices.end()}},
        {.on_finished = submit});
  });
  times.sampling += clock.lap("sampling");
  begin_activity("waiting for rewards");
  if (!has_scores) {
    out.scores = in.rewards.score(prompts, out.trajectories, in.step);
    check_failed(in.comm, in.rewards, out.scores, config);
  }
  if (in.journal != nullptr) in.journal->add(out.trajectories, out.scores);
  times.rewards += clock.lap("rewards");
  return out;
}

// Appends the outcomes of `count` prompts: of this rank's, which are at `positions`; 0 for others.
void append_outcomes(GrpoStepResult& out, const ScoredRollouts& scored, int64_t count,
                     std::span<const int64_t> positions, int64_t size) {
  const size_t begin = out.outcomes.size();
  out.outcomes.resize(begin + static_cast<size_t>(count));
  for (size_t g = 0; g < positions.size(); ++g)
    out.outcomes[begin + static_cast<size_t>(positions[g])] =
        group_outcome(scored.scores, g, size).value_or(0);
}

// Replaces a group by one of another round, which takes its place in the step.
void replace_group(GrpoStepResult& out, size_t group, int64_t index, ScoredRollouts& from,
                   size_t from_group, const GrpoSections& config) {
  ScoredRollouts& rollouts = out.rollouts;
  const int64_t size = config.batch.num_generations;
  Refill& refill = rollouts.refill;
  refill.add_outcome(group_outcome(rollouts.scores, group, size, config.criterion));
  for (int64_t g = 0; g < size; ++g) {
    const size_t at = group * static_cast<size_t>(size) + static_cast<size_t>(g),
                 source = from_group * static_cast<size_t>(size) + static_cast<size_t>(g);
    Trajectory& trajectory = rollouts.trajectories[at];
    refill.tokens += static_cast<double>(trajectory.tokens.size());
    refill.failed_dialogues += !trajectory.environment_error.empty();
    if (refill.first_error.empty()) refill.first_error = trajectory.environment_error;
    trajectory = std::move(from.trajectories[source]);
    trajectory.group = index;
    trajectory.index = index * size + g;
    rollouts.scores.total[at] = from.scores.total[source];
    for (size_t k = 0; k < rollouts.scores.each.size(); ++k)
      rollouts.scores.each[k][at] = from.scores.each[k][source];
  }
}

// Up to refill_rounds times: replaces the groups without a signal by those of new prompts. Which
// they are is known to all ranks, so that the same prompts come to the same places of the step on
// any number of ranks: the k-th of a round, in the order of the places, has the address
// round * prompts_per_step + k.
void refill_groups(const GrpoStep& in, GrpoStepResult& out, StepTimes& times) {
  const int64_t count = in.config.batch.prompts_per_step, size = in.config.batch.num_generations;
  for (int64_t round = 1; round <= in.config.grpo.refill_rounds; ++round) {
    out.rollouts.reward_advantages =
        relative_advantages(in, out.rollouts, out.rollouts.scores.total);
    std::vector<double> silent(static_cast<size_t>(count), 0.0);
    for (size_t g = 0; g < in.indices.size(); ++g)
      silent[static_cast<size_t>(in.indices[g])] = !has_signal(out.rollouts, g, in.config);
    silent = reduce_over_ranks(in.comm, silent);
    // This rank's groups to replace, and their prompts of this round.
    std::vector<size_t> groups;
    std::vector<int64_t> positions, addresses;
    int64_t missing = 0;
    for (int64_t index = 0; index < count; ++index) {
      if (silent[static_cast<size_t>(index)] == 0) continue;
      const auto own = std::lower_bound(in.indices.begin(), in.indices.end(), index);
      if (own != in.indices.end() && *own == index) {
        groups.push_back(static_cast<size_t>(own - in.indices.begin()));
        positions.push_back(missing);
        addresses.push_back(round * count + missing);
      }
      ++missing;
    }
    if (missing == 0) return;
    std::vector<Example> prompts = in.more_prompts(missing, positions);
    ScoredRollouts found = sample_and_score(in, prompts, addresses, times);
    append_outcomes(out, found, missing, positions, size);
    out.rollouts.refill.rounds = round;
    out.rollouts.refill.prompts += missing;
    for (size_t k = 0; k < groups.size(); ++k) {
      replace_group(out, groups[k], in.indices[groups[k]], found, k, in.config);
      out.prompts[groups[k]] = std::move(prompts[k]);
    }
    for (size_t k = 0; k < found.scores.failed.size(); ++k)
      if (found.scores.failed[k]) *out.rollouts.scores.failed[k] += *found.scores.failed[k];
  }
}

// The position of a sequence's completion among those of its rank, which are in order.
size_t completion_of(std::span<const Trajectory> completions, const PolicySequence& sequence) {
  const auto at = std::lower_bound(completions.begin(), completions.end(), sequence.index,
                                   [](const Trajectory& t, int64_t i) { return t.index < i; });
  return static_cast<size_t>(at - completions.begin());
}

// The rewards minus beta times the KL to the reference, summed over the tokens in the loss mask.
// The log-probs of the reference are in the sequences afterwards, and in the micro batches.
std::vector<double> penalized_rewards(const ScoredRollouts& rollouts,
                                      std::span<PolicyUpdate> updates, const GrpoConfig& config) {
  std::vector<double> rewards = rollouts.scores.total;
  for (PolicyUpdate& update : updates) {
    unpack_log_probs(update.batches, update.sequences);
    for (const PolicySequence& s : update.sequences) {
      double kl = 0;
      for (size_t t = 1; t < s.tokens.size(); ++t)
        if (s.loss_mask[t])
          kl +=
              kernels::kl_estimate(config.kl_estimator, s.ref_logprob[t] - s.old_logprob[t]).value;
      rewards[completion_of(rollouts.trajectories, s)] -= config.beta * kl;
    }
  }
  return rewards;
}

// Changes the advantages of sequences whose log-probs are unpacked. Their micro batches are to be
// packed anew.
void set_advantages(std::span<PolicyUpdate> updates, std::span<const Trajectory> completions,
                    std::span<const double> advantages) {
  for (PolicyUpdate& update : updates) {
    for (PolicySequence& s : update.sequences)
      s.advantage = advantages[completion_of(completions, s)];
    update.batches.clear();
    update.pack.micro_batch_tokens = 0;
  }
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

double next_beta(const GrpoConfig& config, double kl, int64_t completions) {
  if (std::isnan(kl)) return config.beta;
  const double error = std::clamp(kl / *config.kl_target - 1, -0.2, 0.2);
  const double share = static_cast<double>(completions) / static_cast<double>(config.kl_horizon);
  return std::clamp(config.beta * (1 + error * share), 1e-30, 1e30);
}

void mix_weights(std::span<const Tensor> reference, std::span<const Tensor> policy, double alpha) {
  constexpr int64_t kPiece = 1 << 22;  // elements, which bounds the memory for sums
  COHORT_CHECK(reference.size() == policy.size(), "[mix_weights] expected ", reference.size(),
               " tensors, got ", policy.size());
  if (reference.empty()) return;
  const Tensor sums =
      Tensor::empty({kPiece}, accumulate_dtype(reference[0].dtype()), reference[0].device());
  for (size_t i = 0; i < reference.size(); ++i) {
    COHORT_CHECK(reference[i].shape() == policy[i].shape(), "[mix_weights] tensor ", i, ": ",
                 policy[i].str(), " into ", reference[i].str());
    const int64_t count = reference[i].numel();
    const Tensor old = reference[i].reshape({count}), now = policy[i].reshape({count});
    for (int64_t begin = 0; begin < count; begin += kPiece) {
      const int64_t length = std::min(kPiece, count - begin);
      Tensor sum = sums.narrow(0, 0, length), mixed = old.narrow(0, begin, length);
      kernels::scale({sum, mixed, 1 - alpha});
      kernels::scale({sum, now.narrow(0, begin, length), alpha, kernels::Grad::kAccumulate});
      kernels::scale({mixed, sum, 1});  // rounds
    }
  }
}

GrpoStepResult grpo_step(const GrpoStep& in) {
  const GrpoSections& config = in.config;
  GrpoStepResult out{.prompts = {in.prompts.begin(), in.prompts.end()}};
  auto& [trajectories, scores, advantages, refill, reward_advantages] = out.rollouts;
  StepTimes times;
  in.learner.check_weights();
  in.sampler.engine().reset_stats();
  if (in.journal != nullptr) in.journal->begin(in);
  out.rollouts = sample_and_score(in, in.prompts, in.indices, times);
  append_outcomes(out, out.rollouts, config.batch.prompts_per_step, in.indices,
                  config.batch.num_generations);
  refill_groups(in, out, times);
  Stopwatch clock;
  reward_advantages = relative_advantages(in, out.rollouts, scores.total);
  advantages = step_advantages(in, out.rollouts, reward_advantages);
  out.rewarded_count = count_rewarded(in.comm, scores);
  times.rewards += clock.lap("rewards");
  begin_activity("updating the weights");
  UpdateSums updates;
  double packing_time = 0;
  if (out.rewarded_count > 0) {
    const auto used_advantages = [&] {
      return config.grpo.shuffle_advantages
                 ? shuffled_advantages(in.comm, out.rollouts, config, in.step)
                 : advantages;
    };
    std::vector<PolicyUpdate> minibatches =
        pack_minibatches(in.comm, in.learner, out.rollouts, used_advantages(), config);
    packing_time = clock.lap("packing");
    if (in.reference.model != nullptr)
      set_log_probs(in.comm, in.learner, minibatches, config, &PolicyBatch::ref_logprob,
                    in.reference);
    if (config.grpo.penalizes_rewards()) {
      const auto penalized = penalized_rewards(out.rollouts, minibatches, config.grpo);
      advantages =
          step_advantages(in, out.rollouts, relative_advantages(in, out.rollouts, penalized));
      set_advantages(minibatches, out.rollouts.trajectories, used_advantages());
    }
    updates = update_policy(in.comm, in.learner, minibatches, config, in.learning_rate, in.step);
  }
  const double update_time = clock.lap("update");
  if (in.journal != nullptr) in.journal->end(in, out.rollouts);
  MetricSums sums =
      grpo_metrics(out.rollouts, in.rewards.names(), updates, config, in.learning_rate);
  if (in.sampler.dialogue().environment != nullptr) add_dialogue_metrics(sums, out.rollouts);
  add_rollout_metrics(sums, in.sampler.engine(), times.sampling);
  sums.add_local("time/sampling", times.sampling);
  sums.add_local("time/rewards", times.rewards);
  sums.add_local("time/packing", packing_time);
  sums.add_local("time/update", update_time);
  double tokens = 0;
  for (const Trajectory& t : trajectories) tokens += static_cast<double>(t.tokens.size());
  sums.add_sum("update/tokens_per_second", updates.made > 0 ? tokens / update_time : std::nan(""));
  out.metrics = sums.reduce(in.comm);
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

std::vector<PolicyUpdate> pack_minibatches(Communicator& comm, Learner& learner,
                                           const ScoredRollouts& rollouts,
                                           std::span<const double> advantages,
                                           const GrpoSections& config) {
  const int64_t parts = config.grpo.num_minibatches;
  const double least_entropy =
      config.grpo.top_entropy_quantile < 1 ? entropy_threshold(comm, rollouts, config) : 0;
  std::vector<PolicyUpdate> out;
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
      if (config.grpo.importance_weights != kernels::Importance::kNone)
        s.sampling_logprob = trajectory.sampling_logprobs;
      if (config.grpo.top_entropy_quantile < 1)
        for (const double entropy : trajectory.entropies)
          s.surrogate_mask.push_back(entropy >= least_entropy);
    }
    StepTotals totals = count_totals(sequences);
    reduce_in_place(comm, {&totals.sequences, &totals.tokens});
    // No update at all: even with a zero gradient AdamW's decay and momentum would move the
    // weights.
    if (totals.tokens == 0) continue;
    std::erase_if(sequences, [&](const auto& s) { return !has_gradient(s, config.grpo); });
    out.push_back({.sequences = std::move(sequences),
                   .pack = {.loss_type = config.grpo.loss_type,
                            .totals = totals,
                            .max_completion_length = config.sampling.max_completion_length,
                            .dtype = accumulate_dtype(learner.model().dtype())},
                   .batches = {}});
  }
  within_memory(learner, out, config, [] {});
  return out;
}

UpdateSums update_policy(Communicator& comm, Learner& learner,
                         std::vector<PolicyUpdate>& minibatches, const GrpoSections& config,
                         double learning_rate, int64_t step) {
  const double temperature = config.sampling.temperature;
  kernels::PolicyLossStats stats;
  const std::function<bool()> is_on_policy = [&] { return stats.max_ratio_deviation == 0; };
  UpdateSums sums;
  const auto over_ranks = [&](double deviation) {
    reduce_in_place(comm, {&deviation}, Reduce::kMax);
    return deviation;
  };
  const auto correct_log_probs = [&](double deviation) {
    sums.ratio_deviation = deviation;
    set_log_probs(comm, learner, minibatches, config, &PolicyBatch::old_logprob,
                  {&learner.model()});
    if (comm.rank() == 0)
      logging::warn(
          "the sampler's log-probs differ from the trainer's: max |ratio - 1| = ", deviation,
          " before the first update, which uses log-probs recomputed by the ", "trainer instead");
  };
  // The ratios of the first minibatch are known with its loss.
  const int64_t every = config.grpo.ratio_check_every;
  if (every > 0 && step % every == 0 && minibatches.size() > 1) {
    double deviation = 0;
    const std::span<PolicyUpdate> others = std::span(minibatches).subspan(1);
    within_memory(learner, others, config, [&] {
      on_all_ranks(comm,
                   [&] { deviation = ratio_deviation(others, learner.model(), temperature); });
    });
    deviation = over_ranks(deviation);
    if (deviation != 0) correct_log_probs(deviation);
  }
  for (int64_t iteration = 0; iteration < config.grpo.num_iterations; ++iteration)
    for (size_t m = 0; m < minibatches.size(); ++m) {
      const bool first = iteration == 0 && m == 0 && sums.ratio_deviation == 0;
      const auto update = [&](const std::function<bool()>& accept) {
        return update_on(learner, minibatches[m], config, iteration == 0 && m == 0, learning_rate,
                         stats, accept);
      };
      Learner::Update done = update(first ? is_on_policy : nullptr);
      if (done.refused) {
        correct_log_probs(over_ranks(stats.max_ratio_deviation));
        done = update(nullptr);
      }
      sums.add(done, stats);
    }
  const int64_t kl_every = config.grpo.kl_check_every;
  if (kl_every > 0 && (step + 1) % kl_every == 0 && !minibatches.empty())
    within_memory(learner, std::span(minibatches).first(1), config, [&] {
      on_all_ranks(
          comm, [&] { sums.step_kl = kl_from_old(minibatches[0], learner.model(), temperature); });
    });
  return sums;
}

}  // namespace cohort
