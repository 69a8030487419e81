#include "trainers/grpo_metrics.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/log.h"
#include "trainers/across_ranks.h"

namespace cohort {
namespace {

constexpr double kNotMeasured = std::numeric_limits<double>::quiet_NaN();

double ratio(double part, double whole) {
  return whole > 0 ? part / whole : kNotMeasured;
}

// Sums that become mean and standard deviation (n - 1) after a reduction over ranks. NaN values are
// left out.
struct Moments {
  double count = 0, sum = 0, squares = 0;
  void add(double v) {
    if (std::isnan(v)) return;
    count += 1;
    sum += v;
    squares += v * v;
  }
  double mean() const { return ratio(sum, count); }
  double deviation() const {
    if (count == 0) return kNotMeasured;
    return count > 1 ? std::sqrt(std::max(0.0, (squares - sum * sum / count) / (count - 1))) : 0;
  }
};

// What ranks add up, beside the moments of the single rewards.
struct Sums {
  double samples = 0, groups = 0, silent_groups = 0;  // groups: with a reward
  double length = 0, truncated = 0, tokens = 0;
  double mask_tokens = 0, entropy = 0, cut = 0;  // of the completions in the loss mask
  kernels::PolicyLossStats policy;
  Moments reward, group_std;
};

Sums count_samples(const ScoredRollouts& scored, const TrainConfig& config) {
  Sums sums;
  for (size_t i = 0; i < scored.rollouts.samples.size(); ++i) {
    const Completion& c = scored.rollouts.samples[i];
    const auto length = static_cast<double>(c.completion_length());
    sums.samples += 1;
    sums.length += length;
    sums.truncated += c.truncated;
    sums.tokens += static_cast<double>(c.tokens.size());
    const bool masked = config.grpo.mask_truncated_completions && c.truncated;
    if (masked || std::isnan(scored.scores.total[i])) continue;
    sums.mask_tokens += length;
    sums.entropy += c.entropy;
    sums.cut += c.cut;
  }
  const auto group = static_cast<size_t>(config.num_generations);
  for (size_t begin = 0; begin < scored.scores.total.size(); begin += group) {
    Moments of_group;
    bool silent = true;
    for (size_t i = begin; i < begin + group; ++i) {
      sums.reward.add(scored.scores.total[i]);
      of_group.add(scored.scores.total[i]);
      silent &= scored.advantages[i] == 0;
    }
    if (of_group.count == 0) continue;
    sums.group_std.add(of_group.deviation());
    sums.groups += 1;
    sums.silent_groups += silent;
  }
  return sums;
}

// Numbers of a struct of doubles, and back.
template <class T>
void append(std::vector<double>& values, const T& numbers) {
  static_assert(sizeof(T) % sizeof(double) == 0);
  const auto* first = reinterpret_cast<const double*>(&numbers);
  values.insert(values.end(), first, first + sizeof(T) / sizeof(double));
}
template <class T>
T take(const std::vector<double>& values, size_t& at) {
  T numbers;
  std::copy_n(values.data() + at, sizeof(T) / sizeof(double), reinterpret_cast<double*>(&numbers));
  at += sizeof(T) / sizeof(double);
  return numbers;
}

}  // namespace

double GrpoMetrics::ratio_deviation() const {
  return kernels::PolicyLossStats::from(stats_).max_ratio_deviation;
}

void GrpoMetrics::restart_update() {
  first_ratio_deviation_ = ratio_deviation();
  stats_.zero_();
}

void GrpoMetrics::add_update(const Learner::Update& update) {
  const auto stats = kernels::PolicyLossStats::from(stats_);
  stats_.zero_();
  total_.tokens += stats.tokens;
  total_.clipped_low += stats.clipped_low;
  total_.clipped_high += stats.clipped_high;
  total_.kl_to_old += stats.kl_to_old;
  total_.kl_to_reference += stats.kl_to_reference;
  if (updates_ == 0)
    first_ratio_deviation_ = std::max(first_ratio_deviation_, stats.max_ratio_deviation);
  loss_ += update.loss;
  grad_norm_ += update.grad_norm;
  updates_ += 1;
}

Metrics GrpoMetrics::summary(Communicator& comm, const ScoredRollouts& scored,
                             const std::vector<std::string>& reward_names,
                             const TrainConfig& config, double learning_rate) const {
  Sums sums = count_samples(scored, config);
  sums.policy = total_;
  std::vector<double> values;
  append(values, sums);
  for (const std::vector<double>& each : scored.scores.each) {
    Moments m;
    for (const double v : each) m.add(v);
    append(values, m);
  }
  values = reduce_over_ranks(comm, values);
  size_t at = 0;
  sums = take<Sums>(values, at);
  double longest = 0;
  for (const Completion& c : scored.rollouts.samples)
    longest = std::max(longest, static_cast<double>(c.completion_length()));
  const std::vector<double> maxima =
      reduce_over_ranks(comm, {longest, first_ratio_deviation_}, Reduce::kMax);
  if (maxima[1] != 0 && comm.rank() == 0)
    logging::warn(
        "the sampler's log-probs differ from the trainer's: max |ratio - 1| = ", maxima[1],
        " on the first minibatch; it was repeated with old log-probs that the trainer "
        "computed");

  Metrics out{{"reward", sums.reward.mean()}, {"reward_std", sums.group_std.mean()}};
  for (const std::string& name : reward_names) {
    const auto m = take<Moments>(values, at);
    out.emplace_back("rewards/" + name + "/mean", m.mean());
    out.emplace_back("rewards/" + name + "/std", m.deviation());
  }
  const auto updates = static_cast<double>(updates_);
  const double passes = static_cast<double>(config.grpo.num_iterations) * sums.mask_tokens;
  out.insert(out.end(),
             {{"frac_reward_zero_std", ratio(sums.silent_groups, sums.groups)},
              {"ratio_deviation", maxima[1]},
              {"clip_ratio/low", ratio(sums.policy.clipped_low, passes)},
              {"clip_ratio/high", ratio(sums.policy.clipped_high, passes)},
              {"kl_old", ratio(sums.policy.kl_to_old, sums.policy.tokens)},
              {"kl", config.grpo.beta > 0 ? ratio(sums.policy.kl_to_reference, sums.policy.tokens)
                                          : kNotMeasured},
              {"entropy", ratio(sums.entropy, sums.mask_tokens)}});
  if (config.sampling.restricts())
    out.emplace_back("cut_probability", ratio(sums.cut, sums.mask_tokens));
  out.insert(out.end(), {{"completions/mean_length", ratio(sums.length, sums.samples)},
                         {"completions/max_length", maxima[0]},
                         {"completions/clipped_ratio", ratio(sums.truncated, sums.samples)},
                         {"loss", ratio(loss_, updates)},
                         {"grad_norm", ratio(grad_norm_, updates)},
                         {"learning_rate", learning_rate},
                         {"num_tokens", sums.tokens}});
  return out;
}

}  // namespace cohort
