// The binomial quotient is a product of k factors, none of which can overflow.
#include "rl/evaluate.h"

#include <cmath>
#include <limits>

#include "core/check.h"

namespace cohort {

double pass_at_k(int64_t n, int64_t c, int64_t k) {
  COHORT_CHECK(1 <= k && k <= n, "[pass_at_k] expected k from 1 to n = ", n, ", got ", k);
  COHORT_CHECK(0 <= c && c <= n, "[pass_at_k] expected c from 0 to n = ", n, ", got ", c);
  double all_wrong = 1;
  for (int64_t i = 0; i < k; ++i) {
    if (n - c - i <= 0) return 1;  // fewer than k wrong samples
    all_wrong *= static_cast<double>(n - c - i) / static_cast<double>(n - i);
  }
  return 1 - all_wrong;
}

double mean_pass_at_k(std::span<const double> correct, int64_t num_generations, int64_t k) {
  const auto size = static_cast<int64_t>(correct.size());
  COHORT_CHECK(num_generations > 0 && size > 0 && size % num_generations == 0,
               "[pass_at_k] expected groups of ", num_generations, ", got ", size, " values");
  double sum = 0;
  int64_t prompts = 0;
  for (int64_t begin = 0; begin < size; begin += num_generations) {
    int64_t judged = 0, right = 0;
    for (int64_t i = begin; i < begin + num_generations; ++i) {
      const double verdict = correct[static_cast<size_t>(i)];
      judged += !std::isnan(verdict);
      right += verdict == 1;
    }
    if (judged < k) continue;
    sum += pass_at_k(judged, right, k);
    ++prompts;
  }
  return prompts > 0 ? sum / static_cast<double>(prompts)
                     : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace cohort
