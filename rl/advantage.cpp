// Group statistics are computed over the sorted rewards, so that permuting the samples of a group
// permutes the advantages exactly.
#include "rl/advantage.h"

#include <algorithm>
#include <iterator>

namespace cohort {
namespace {

// Statistics of the values that are not NaN. size: the largest of their absolute values.
struct Statistics {
  double n = 0, size = 0, mean = 0, std = 0;
  explicit Statistics(std::span<const double> all) {
    std::vector<double> values;
    std::ranges::copy_if(all, std::back_inserter(values), [](double v) { return !std::isnan(v); });
    if (values.empty()) return;
    std::ranges::sort(values);
    n = static_cast<double>(values.size());
    size = std::max(std::abs(values.front()), std::abs(values.back()));
    double sum = 0;
    for (const double v : values) sum += v / n;
    mean = without_rounding(sum, size);
    // The mean of equal values may differ from them by rounding, which a scale would amplify.
    if (equal_rewards(values.front(), values.back())) return;
    double squares = 0;
    for (const double v : values) squares += (v - mean) * (v - mean);
    std = std::sqrt(squares / (n - 1));
  }
  double centred(double value) const { return without_rounding(value - mean, size); }
};

void group_advantages(std::span<double> out, std::span<const double> rewards, AdvantageScale scale,
                      double batch_std) {
  const Statistics group(rewards);
  if (group.std == 0) return;
  const double factor =
      entry_of(kAdvantageScales, scale)
          .factor({.n = group.n, .mean = group.mean, .std = group.std, .batch_std = batch_std});
  for (size_t i = 0; i < rewards.size(); ++i)
    if (!std::isnan(rewards[i])) out[i] = group.centred(rewards[i]) * factor;
}

}  // namespace

bool equal_rewards(double a, double b) {
  constexpr double kRelative = 1e-9, kAbsolute = 0x1p-48;
  return std::abs(a - b) <= std::max(kAbsolute, kRelative * std::max(std::abs(a), std::abs(b)));
}

double without_rounding(double sum, double size) {
  constexpr double kRounding = 1e-12;
  return std::abs(sum) < kRounding * size ? 0 : sum;
}

double weighted_sum(std::span<const double> weights, std::span<const double> values) {
  double sum = 0, size = 0;
  bool any = false;
  for (size_t k = 0; k < weights.size(); ++k) {
    if (std::isnan(values[k])) continue;
    const double term = weights[k] * values[k];
    sum += term;
    size += std::abs(term);
    any = true;
  }
  return any || weights.empty() ? without_rounding(sum, size) : std::nan("");
}

std::vector<double> group_advantages(std::span<const double> rewards, int64_t group_size,
                                     AdvantageScale scale, double batch_std) {
  const auto count = static_cast<int64_t>(rewards.size());
  COHORT_CHECK(group_size > 0 && count % group_size == 0, "[advantage] expected groups of ",
               group_size, ", got ", count, " values");
  const auto size = static_cast<size_t>(group_size);
  std::vector<double> advantages(rewards.size(), 0.0);
  for (size_t begin = 0; begin < rewards.size(); begin += size)
    group_advantages(std::span(advantages).subspan(begin, size), rewards.subspan(begin, size),
                     scale, batch_std);
  return advantages;
}

void whiten_advantages(std::span<double> advantages, std::span<const double> tokens) {
  double count = 0, mean = 0, squares = 0;
  std::vector<double> counted;
  for (size_t i = 0; i < advantages.size(); ++i)
    if (tokens[i] > 0) {
      count += tokens[i];
      counted.push_back(advantages[i]);
    }
  const Statistics samples(counted);
  if (count < 2 || samples.std == 0) return;
  for (size_t i = 0; i < advantages.size(); ++i) mean += tokens[i] / count * advantages[i];
  mean = without_rounding(mean, samples.size);
  for (size_t i = 0; i < advantages.size(); ++i)
    squares += tokens[i] * (advantages[i] - mean) * (advantages[i] - mean);
  for (size_t i = 0; i < advantages.size(); ++i)
    if (tokens[i] > 0)
      advantages[i] = without_rounding(advantages[i] - mean, samples.size) /
                      std::sqrt(squares / (count - 1) + 1e-8);
}

void standardize(std::span<double> advantages, std::span<const double> rewards) {
  std::vector<double> rewarded;
  for (size_t i = 0; i < rewards.size(); ++i)
    if (!std::isnan(rewards[i])) rewarded.push_back(advantages[i]);
  const Statistics step(rewarded);
  for (size_t i = 0; i < advantages.size(); ++i)
    advantages[i] = !std::isnan(rewards[i]) && step.std > 0
                        ? step.centred(advantages[i]) / (step.std + 1e-4)
                        : 0;
}

double quantile(std::vector<double> values, double q) {
  if (values.empty()) return -HUGE_VAL;
  const double position = q * static_cast<double>(values.size() - 1);
  const auto below = static_cast<ptrdiff_t>(position);
  std::nth_element(values.begin(), values.begin() + below, values.end());
  const double low = values[static_cast<size_t>(below)];
  if (position == static_cast<double>(below)) return low;
  const double high = *std::min_element(values.begin() + below + 1, values.end());
  return low + (position - static_cast<double>(below)) * (high - low);
}

double reward_std(std::span<const double> rewards) {
  return Statistics(rewards).std;
}

}  // namespace cohort
