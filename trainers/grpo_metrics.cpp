#include "trainers/grpo_metrics.h"

#include <algorithm>
#include <cmath>

#include "core/log.h"
#include "rl/advantage.h"

namespace cohort {
namespace {

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
  double mean() const { return count > 0 ? sum / count : 0; }
  double deviation() const {
    return count > 1 ? std::sqrt(std::max(0.0, (squares - sum * sum / count) / (count - 1))) : 0;
  }
};

void append(std::vector<double>& values, const Moments& m) {
  values.insert(values.end(), {m.count, m.sum, m.squares});
}

Moments moments_at(const std::vector<double>& values, size_t i) {
  return {values[i], values[i + 1], values[i + 2]};
}

double share(double part, double whole) {
  return whole > 0 ? part / whole : 0;
}

}  // namespace

void GrpoMetrics::add_batch(const Tensor& entropy, const PolicyBatch& batch) {
  batches_.push_back({entropy, batch.weight});
}

void GrpoMetrics::add_update(const Learner::Update& update) {
  const auto stats = kernels::PolicyLossStats::from(stats_);
  stats_.zero_();
  total_.tokens += stats.tokens;
  total_.clipped_low += stats.clipped_low;
  total_.clipped_high += stats.clipped_high;
  total_.kl_to_old += stats.kl_to_old;
  total_.kl_to_reference += stats.kl_to_reference;
  if (updates_ == 0) first_ratio_deviation_ = stats.max_ratio_deviation;
  for (const Entropies& batch : batches_) {
    const auto h = batch.entropy.to_vector<double>(), weight = batch.weight.to_vector<double>();
    for (size_t i = 0; i < h.size(); ++i)
      if (weight[i] > 0) entropy_ += h[i];
  }
  batches_.clear();
  loss_ += update.loss;
  grad_norm_ += update.grad_norm;
  updates_ += 1;
}

Metrics GrpoMetrics::summary(Communicator& comm, const Rollouts& rollouts,
                             const RewardSet::Scores& scores,
                             const std::vector<std::string>& reward_names,
                             const std::vector<double>& advantages, double learning_rate) const {
  const auto group = static_cast<size_t>(rollouts.num_generations);
  Moments reward, group_std;
  for (size_t begin = 0; begin < scores.total.size(); begin += group) {
    Moments of_group;
    for (size_t i = begin; i < begin + group; ++i) {
      reward.add(scores.total[i]);
      of_group.add(scores.total[i]);
    }
    group_std.add(of_group.deviation());
  }
  double length = 0, longest = 0, truncated = 0, tokens = 0;
  for (const Completion& c : rollouts.samples) {
    length += static_cast<double>(c.completion_length());
    longest = std::max(longest, static_cast<double>(c.completion_length()));
    truncated += c.truncated;
    tokens += static_cast<double>(c.tokens.size());
  }
  const auto samples = static_cast<double>(rollouts.samples.size());
  const double groups = samples / static_cast<double>(group);
  const double silent =
      groups > 0 ? zero_signal_share(advantages, rollouts.num_generations) * groups : 0;
  std::vector<double> sums{samples,
                           groups,
                           silent,
                           length,
                           truncated,
                           tokens,
                           total_.tokens,
                           total_.clipped_low,
                           total_.clipped_high,
                           total_.kl_to_old,
                           total_.kl_to_reference,
                           entropy_};
  const size_t first_moments = sums.size();
  append(sums, reward);
  append(sums, group_std);
  for (const std::vector<double>& each : scores.each) {
    Moments m;
    for (const double v : each) m.add(v);
    append(sums, m);
  }
  sums = reduce_over_ranks(comm, sums);
  const std::vector<double> maxima =
      reduce_over_ranks(comm, {longest, first_ratio_deviation_}, Reduce::kMax);
  if (maxima[1] != 0)
    logging::warn("the trainer's log-probs differ from the sampler's: max |ratio - 1| = ",
                  maxima[1], " on the first minibatch");

  Metrics out{{"reward", moments_at(sums, first_moments).mean()},
              {"reward_std", moments_at(sums, first_moments + 3).mean()}};
  for (size_t i = 0; i < reward_names.size(); ++i) {
    const Moments m = moments_at(sums, first_moments + 6 + 3 * i);
    out.emplace_back("rewards/" + reward_names[i] + "/mean", m.mean());
    out.emplace_back("rewards/" + reward_names[i] + "/std", m.deviation());
  }
  const auto updates = static_cast<double>(std::max<int64_t>(1, updates_));
  const double policy_tokens = sums[6];
  out.insert(out.end(), {{"frac_reward_zero_std", share(sums[2], sums[1])},
                         {"ratio_deviation", maxima[1]},
                         {"clip_ratio/low", share(sums[7], policy_tokens)},
                         {"clip_ratio/high", share(sums[8], policy_tokens)},
                         {"kl_old", share(sums[9], policy_tokens)},
                         {"kl", share(sums[10], policy_tokens)},
                         {"entropy", share(sums[11], policy_tokens)},
                         {"completions/mean_length", share(sums[3], sums[0])},
                         {"completions/max_length", maxima[0]},
                         {"completions/clipped_ratio", share(sums[4], sums[0])},
                         {"loss", loss_ / updates},
                         {"grad_norm", grad_norm_ / updates},
                         {"learning_rate", learning_rate},
                         {"num_tokens", sums[5]}});
  return out;
}

}  // namespace cohort
