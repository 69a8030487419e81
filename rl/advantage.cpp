// Group statistics are taken over the sorted rewards, so that the order of a group's samples leaves
// no trace in the last bits: permuting the samples permutes the advantages exactly.
#include "rl/advantage.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace cohort {
namespace {

double scale_factor(AdvantageScale scale, const GroupStatistics& group) {
#define COHORT_FACTOR(type, name, factor) \
  if (scale == AdvantageScale::type) return factor;
  COHORT_ADVANTAGE_SCALES(COHORT_FACTOR)
#undef COHORT_FACTOR
  return 1;
}

void group_advantages(std::span<double> out, std::span<const double> rewards,
                      AdvantageScale scale) {
  std::vector<double> valid;
  std::copy_if(rewards.begin(), rewards.end(), std::back_inserter(valid),
               [](double r) { return !std::isnan(r); });
  std::sort(valid.begin(), valid.end());
  // The mean of equal values need not equal them: nothing below may see such a group.
  if (valid.empty() || valid.front() == valid.back()) return;

  const auto n = static_cast<double>(valid.size());
  double mean = 0, squares = 0;
  for (const double r : valid) mean += r / n;
  for (const double r : valid) squares += (r - mean) * (r - mean);
  const double factor = scale_factor(scale, {.n = n, .std = std::sqrt(squares / (n - 1))});
  for (size_t i = 0; i < rewards.size(); ++i)
    if (!std::isnan(rewards[i])) out[i] = (rewards[i] - mean) * factor;
}

}  // namespace

std::vector<double> group_advantages(std::span<const double> rewards, int64_t group_size,
                                     AdvantageScale scale) {
  const auto count = static_cast<int64_t>(rewards.size());
  COHORT_CHECK(group_size > 0 && count % group_size == 0, "[advantage] expected groups of ",
               group_size, ", got ", count, " values");
  const auto size = static_cast<size_t>(group_size);
  std::vector<double> advantages(rewards.size(), 0.0);
  for (size_t begin = 0; begin < rewards.size(); begin += size)
    group_advantages(std::span(advantages).subspan(begin, size), rewards.subspan(begin, size),
                     scale);
  return advantages;
}

}  // namespace cohort
