#include "trainers/grpo_metrics.h"

#include <algorithm>
#include <cmath>

#include "kernels/policy_token.h"

namespace cohort {
namespace {

// Sums over the completions of one rank.
struct SampleSums {
  Moments reward;
  std::vector<Moments> rewards;  // by name
  double lowest = HUGE_VAL, highest = -HUGE_VAL, longest = 0;
  // Sums over completions in the loss mask.
  double mask_tokens = 0, entropy = 0, truncated_mass = 0;
  Moments length, terminated_length, at_length, at_context;
  // Sums over the groups that have a reward.
  Moments deviation, zero_variance;
};

void add_completion(SampleSums& sums, const ScoredCompletion& c, const GrpoConfig& config) {
  sums.reward.add(c.reward);
  for (size_t k = 0; k < sums.rewards.size(); ++k) sums.rewards[k].add(c.rewards[k]);
  sums.lowest = std::fmin(sums.lowest, c.reward);
  sums.highest = std::fmax(sums.highest, c.reward);
  const auto length = static_cast<double>(c.completion_length());
  sums.length.add(length);
  if (!c.truncated()) sums.terminated_length.add(length);
  sums.longest = std::max(sums.longest, length);
  sums.at_length.add(c.stop_reason == StopReason::kLength);
  sums.at_context.add(c.stop_reason == StopReason::kContext);
  if (count_loss_tokens(c, config) == 0) return;
  sums.mask_tokens += length;
  sums.entropy += c.entropy();
  sums.truncated_mass += c.truncated_mass;
}

SampleSums count_samples(const ScoredRollouts& scored, size_t num_rewards,
                         const GrpoConfig& config) {
  SampleSums sums{.rewards = std::vector<Moments>(num_rewards)};
  for (const Group& group : scored.groups) {
    std::vector<double> rewards;
    for (const ScoredCompletion& c : group.completions) {
      add_completion(sums, c, config);
      rewards.push_back(c.reward);
    }
    if (std::ranges::all_of(rewards, [](double r) { return std::isnan(r); })) continue;
    sums.deviation.add(reward_std(rewards));
    sums.zero_variance.add(!has_signal(group, config));
  }
  return sums;
}

}  // namespace

void GroupCounts::add(const Group& group, const SuccessCriterion& criterion) {
  if (const auto outcome = group_outcome(group, criterion)) {
    solved.add(*outcome > 0);
    failed.add(*outcome < 0);
  }
  for (const ScoredCompletion& c : group.completions) {
    tokens += static_cast<double>(c.tokens.size());
    failed_dialogues += !c.environment_error.empty();
    if (first_error.empty()) first_error = c.environment_error;
  }
}

GroupCounts ScoredRollouts::count(const SuccessCriterion& criterion) const {
  GroupCounts out = replaced;
  for (const Group& group : groups) out.add(group, criterion);
  return out;
}

void UpdateSums::add(const Learner::Update& update) {
  kernels::add(policy, update.stats);
  if (!update.made) return;
  made += 1;
  clipped += update.clipped;
  loss += update.loss;
  grad_norm += update.grad_norm;
}

void add_dialogue_metrics(MetricSums& out, const ScoredRollouts& dialogues) {
  Moments turns, observed, truncated;
  for (const Group& group : dialogues.groups)
    for (const ScoredCompletion& c : group.completions) {
      turns.add(static_cast<double>(c.num_turns()));
      observed.add(
          static_cast<double>(std::ssize(c.tokens) - c.prompt_length - c.completion_length()));
      truncated.add(c.stop_reason == StopReason::kTurns);
    }
  out.add_mean("environment/turns", turns);
  out.add_mean("environment/observed_tokens", observed);
  out.add_mean("environment/turns_ratio", truncated);
  out.add_sum("environment/failed", dialogues.count().failed_dialogues);
}

MetricSums grpo_metrics(const ScoredRollouts& scored, const std::vector<std::string>& reward_names,
                        const UpdateSums& updates, const GrpoSections& config,
                        double learning_rate) {
  const SampleSums samples = count_samples(scored, reward_names.size(), config.grpo);
  const GroupCounts groups = scored.count(config.criterion);
  const double passes = static_cast<double>(config.grpo.num_iterations) * samples.mask_tokens;
  const kernels::PolicyLossStats& policy = updates.policy;
  const auto over_updates = [&](double sum) { return Moments{sum, updates.made}.mean(); };

  MetricSums out;
  out.add_mean("reward", samples.reward);
  out.add_mean("reward_std", samples.deviation);
  out.add_max("reward_max", samples.highest);
  out.add_min("reward_min", samples.lowest);
  for (size_t k = 0; k < reward_names.size(); ++k) {
    const std::string name = "rewards/" + reward_names[k];
    out.add_mean(name + "/mean", samples.rewards[k]);
    out.add_deviation(name + "/std", samples.rewards[k]);
  }
  for (const auto& [name, count] : scored.counts) out.add_sum(name, static_cast<double>(count));
  out.add_mean("frac_reward_zero_std", samples.zero_variance);
  out.add_mean("frac_groups_solved", groups.solved);
  out.add_mean("frac_groups_failed", groups.failed);
  out.add_local("ratio_deviation", updates.ratio_deviation);
  out.add_mean("clip_ratio/low", policy.clipped_low, passes);
  out.add_mean("clip_ratio/high", policy.clipped_high, passes);
  if (updates.load.largest > 0)
    out.add_local("update/balance", updates.load.mean / updates.load.largest);
  out.add_mean("kl_old", policy.kl_to_old, policy.tokens);
  out.add_mean("kl", policy.kl_to_reference, config.grpo.beta > 0 ? policy.tokens : 0);
  if (config.grpo.masks_tokens()) out.add_mean("masked_tokens", updates.masked, updates.tokens);
  if (config.grpo.importance_weights != kernels::Importance::kNone)
    out.add_mean("importance_weight", policy.importance, policy.tokens);
  out.add_mean("entropy", samples.entropy, samples.mask_tokens);
  if (config.sampling.restricts())
    out.add_mean("truncated_mass", samples.truncated_mass, samples.mask_tokens);
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
  out.add_sum("num_tokens", groups.tokens);
  if (config.grpo.dynamic_sampling_rounds > 0) {
    out.add_local("rollout/rounds", static_cast<double>(1 + scored.dynamic_sampling_rounds));
    out.add_local("rollout/prompts", static_cast<double>(scored.num_prompts));
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
