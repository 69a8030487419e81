// Group statistics are computed over the sorted rewards, so that permuting the samples of a group
// permutes the advantages exactly.
#include "rl/advantage.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace cohort {
namespace {

double scale_factor(AdvantageScale scale, const GroupStatistics& group) {
  for (const AdvantageScaleEntry& entry : kAdvantageScales)
    if (entry.value == scale) return entry.factor(group);
  throw Error("[advantage] expected a scale of kAdvantageScales");
}

// True if two totals differ by no more than the rounding of their sums: 0.3 and 0.1 + 0.2 are
// equal.
bool equal_rewards(double a, double b) {
  constexpr double kRelative = 1e-9;
  return std::abs(a - b) <= kRelative * std::max(std::abs(a), std::abs(b));
}

// The rewards that are not NaN, sorted.
std::vector<double> valid_rewards(std::span<const double> rewards) {
  std::vector<double> valid;
  std::copy_if(rewards.begin(), rewards.end(), std::back_inserter(valid),
               [](double r) { return !std::isnan(r); });
  std::sort(valid.begin(), valid.end());
  return valid;
}

double mean_of(const std::vector<double>& values) {
  double mean = 0;
  for (const double v : values) mean += v / static_cast<double>(values.size());
  return mean;
}

double std_of(const std::vector<double>& values) {
  const double mean = mean_of(values);
  double squares = 0;
  for (const double v : values) squares += (v - mean) * (v - mean);
  return std::sqrt(squares / static_cast<double>(values.size() - 1));
}

void group_advantages(std::span<double> out, std::span<const double> rewards, AdvantageScale scale,
                      double batch_std) {
  const std::vector<double> valid = valid_rewards(rewards);
  // The mean of equal values may differ from them by rounding, which the scale would amplify.
  if (valid.empty() || equal_rewards(valid.front(), valid.back())) return;

  const double mean = mean_of(valid);
  const double factor = scale_factor(
      scale,
      {.n = static_cast<double>(valid.size()), .std = std_of(valid), .batch_std = batch_std});
  for (size_t i = 0; i < rewards.size(); ++i)
    if (!std::isnan(rewards[i])) out[i] = (rewards[i] - mean) * factor;
}

}  // namespace

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

double reward_std(std::span<const double> rewards) {
  const std::vector<double> valid = valid_rewards(rewards);
  return valid.size() < 2 ? 0 : std_of(valid);
}

}  // namespace cohort
