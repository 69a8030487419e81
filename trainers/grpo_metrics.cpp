#include "trainers/grpo_metrics.h"

#include <algorithm>
#include <cmath>

#include "kernels/policy_token.h"

namespace cohort {
namespace {

// Sums over the completions of one rank.
struct SampleSums {
  double longest = 0;
  // Sums over completions in the loss mask.
  double mask_tokens = 0, entropy = 0, truncated_mass = 0;
  Moments length, terminated_length, at_length, at_context;
  // Sums over the groups that have a reward.
  Moments deviation, zero_variance;
  Refill groups;
};

SampleSums count_samples(const ScoredRollouts& scored, const GrpoSections& config) {
  SampleSums sums;
  sums.groups = scored.refill;
  const auto group = static_cast<size_t>(config.batch.num_generations);
  for (size_t begin = 0; begin < scored.trajectories.size(); begin += group) {
    const std::span<const double> rewards = std::span(scored.scores.total).subspan(begin, group);
    for (size_t i = begin; i < begin + group; ++i) {
      const Trajectory& c = scored.trajectories[i];
      const auto length = static_cast<double>(c.completion_length());
      sums.length.add(length);
      if (!c.truncated()) sums.terminated_length.add(length);
      sums.longest = std::max(sums.longest, length);
      sums.at_length.add(c.stop_reason == StopReason::kLength);
      sums.at_context.add(c.stop_reason == StopReason::kContext);
      sums.groups.tokens += static_cast<double>(c.tokens.size());
      const int64_t loss_tokens = count_loss_tokens(c, scored.scores.total[i], config.grpo);
      if (loss_tokens == 0) continue;
      sums.mask_tokens += static_cast<double>(loss_tokens);
      sums.entropy += c.entropy();
      sums.truncated_mass += c.truncated_mass;
    }
    sums.groups.add_outcome(group_outcome(scored.scores, begin / group,
                                          config.batch.num_generations, config.criterion));
    if (std::ranges::all_of(rewards, [](double r) { return std::isnan(r); })) continue;
    sums.deviation.add(reward_std(rewards));
    sums.zero_variance.add(!has_signal(scored, begin / group, config));
  }
  return sums;
}

Moments moments_of(const std::vector<double>& values) {
  Moments moments;
  for (const double v : values) moments.add(v);
  return moments;
}

}  // namespace

int64_t count_loss_tokens(const Trajectory& completion, double reward, const GrpoConfig& config) {
  if (std::isnan(reward) || (config.mask_truncated_completions && completion.truncated())) return 0;
  return completion.completion_length();
}

std::optional<int> group_outcome(const RewardSet::Scores& scores, size_t group, int64_t size,
                                 const OutcomeCriterion& criterion) {
  const auto& [reward, threshold] = criterion;
  const auto& all = reward < 0 ? scores.total : scores.each[static_cast<size_t>(reward)];
  double lowest = HUGE_VAL, highest = -HUGE_VAL;
  for (double v :
       std::span(all).subspan(group * static_cast<size_t>(size), static_cast<size_t>(size))) {
    if (reward >= 0 && !std::isnan(v)) v = v >= threshold ? 1 : -1;
    lowest = std::fmin(lowest, v), highest = std::fmax(highest, v);
  }
  if (lowest > highest) return std::nullopt;
  if (!equal_rewards(lowest, highest)) return 0;
  return highest > 0 && !equal_rewards(highest, 0) ? 1 : -1;
}

bool has_signal(const ScoredRollouts& rollouts, size_t group, const GrpoSections& config) {
  const auto size = static_cast<size_t>(config.batch.num_generations);
  const std::vector<double>& advantages =
      rollouts.reward_advantages.empty() ? rollouts.advantages : rollouts.reward_advantages;
  for (size_t i = group * size; i < (group + 1) * size; ++i)
    if (advantages[i] != 0 &&
        count_loss_tokens(rollouts.trajectories[i], rollouts.scores.total[i], config.grpo) > 0)
      return true;
  return false;
}

void Refill::add_outcome(std::optional<int> outcome) {
  if (!outcome) return;
  solved.add(*outcome > 0);
  failed.add(*outcome < 0);
}

void UpdateSums::add(const Learner::Update& update, const kernels::PolicyLossStats& stats) {
  kernels::add(policy, stats);
  if (!update.made) return;
  made += 1;
  clipped += update.clipped;
  loss += update.loss;
  grad_norm += update.grad_norm;
}

void add_dialogue_metrics(MetricSums& out, const ScoredRollouts& dialogues) {
  Moments turns, observed, truncated, failed{.sum = dialogues.refill.failed_dialogues};
  for (const Trajectory& t : dialogues.trajectories) {
    turns.add(static_cast<double>(t.num_turns()));
    observed.add(
        static_cast<double>(std::ssize(t.tokens) - t.prompt_length - t.completion_length()));
    truncated.add(t.stop_reason == StopReason::kTurns);
    failed.add(!t.environment_error.empty());
  }
  out.add_mean("environment/turns", turns);
  out.add_mean("environment/observed_tokens", observed);
  out.add_mean("environment/turns_ratio", truncated);
  out.add_sum("environment/failed", failed.sum);
}

MetricSums grpo_metrics(const ScoredRollouts& scored, const std::vector<std::string>& reward_names,
                        const UpdateSums& updates, const GrpoSections& config,
                        double learning_rate) {
  const SampleSums samples = count_samples(scored, config);
  const double passes = static_cast<double>(config.grpo.num_iterations) * samples.mask_tokens;
  const kernels::PolicyLossStats& policy = updates.policy;
  const auto over_updates = [&](double sum) { return Moments{sum, updates.made}.mean(); };

  MetricSums out;
  out.add_mean("reward", moments_of(scored.scores.total));
  out.add_mean("reward_std", samples.deviation);
  double lowest = HUGE_VAL, highest = -HUGE_VAL;
  for (const double reward : scored.scores.total)
    if (!std::isnan(reward)) lowest = std::min(lowest, reward), highest = std::max(highest, reward);
  out.add_max("reward_max", highest);
  out.add_min("reward_min", lowest);
  for (size_t k = 0; k < reward_names.size(); ++k) {
    const Moments reward = moments_of(scored.scores.each[k]);
    out.add_mean("rewards/" + reward_names[k] + "/mean", reward);
    out.add_deviation("rewards/" + reward_names[k] + "/std", reward);
    if (const auto failed = scored.scores.failed[k])
      out.add_sum("rewards/" + reward_names[k] + "/failed", static_cast<double>(*failed));
  }
  out.add_mean("frac_reward_zero_std", samples.zero_variance);
  out.add_mean("frac_groups_solved", samples.groups.solved);
  out.add_mean("frac_groups_failed", samples.groups.failed);
  out.add_local("ratio_deviation", updates.ratio_deviation);
  out.add_mean("clip_ratio/low", policy.clipped_low, passes);
  out.add_mean("clip_ratio/high", policy.clipped_high, passes);
  out.add_mean("kl_old", policy.kl_to_old, policy.tokens);
  out.add_mean("kl", policy.kl_to_reference, config.grpo.beta > 0 ? policy.tokens : 0);
  if (config.grpo.importance_weights != kernels::Importance::kNone)
    out.add_mean("importance_weight", policy.importance, policy.tokens);
  out.add_mean("entropy", samples.entropy, samples.mask_tokens);
  if (config.sampling.restricts())
    out.add_mean("cut_probability", samples.truncated_mass, samples.mask_tokens);
  out.add_mean("completions/mean_length", samples.length);
  out.add_mean("completions/mean_terminated_length", samples.terminated_length);
  out.add_max("completions/max_length", samples.longest);
  out.add_mean("completions/clipped_ratio", samples.at_length);
  out.add_mean("completions/context_ratio", samples.at_context);
  out.add_local("num_updates", updates.made);
  out.add_local("loss", over_updates(updates.loss));
  out.add_local("grad_norm", over_updates(updates.grad_norm));
  out.add_local("grad_clipped", over_updates(updates.clipped));
  out.add_mean("update/kl", updates.step_kl);
  out.add_local("learning_rate", learning_rate);
  out.add_sum("num_tokens", samples.groups.tokens);
  if (config.grpo.refill_rounds > 0) {
    out.add_local("rollout/rounds", static_cast<double>(1 + scored.refill.rounds));
    out.add_local("rollout/prompts",
                  static_cast<double>(config.batch.prompts_per_step + scored.refill.prompts));
  }
  return out;
}

void add_rollout_metrics(MetricSums& out, const Engine& engine, double seconds) {
  const EngineStats stats = engine.stats();
  const auto as_double = [](int64_t n) { return static_cast<double>(n); };
  out.add_sum("rollout/tokens_per_second", as_double(stats.decoded_tokens) / seconds);
  out.add_sum("rollout/prompt_tokens", as_double(stats.prefilled_tokens));
  out.add_max("rollout/sequences", as_double(stats.most_running));
  const int64_t block_bytes = engine.cache_bytes() / std::max<int64_t>(1, stats.blocks);
  out.add_max("rollout/cache_mib", as_double(stats.most_blocks * block_bytes) / (1 << 20));
  out.add_sum("rollout/preemptions", as_double(stats.preemptions));
  if (const double bandwidth = memory_bandwidth(engine.model().device()); bandwidth > 0)
    out.add_local("rollout/roofline", as_double(stats.decode_bytes) / bandwidth / seconds);
}

}  // namespace cohort
