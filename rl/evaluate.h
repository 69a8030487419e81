// Pass rates on held-out problems.
#pragma once

#include <cstdint>
#include <span>

namespace cohort {

// Unbiased pass@k from n samples of which c are right: 1 - C(n - c, k) / C(n, k) (Chen et al.
// 2021). Throws Error unless 1 <= k <= n and 0 <= c <= n.
double pass_at_k(int64_t n, int64_t c, int64_t k);

// Mean pass@k over prompts of sampled completions, of which `correct` says 1 (right), 0 (wrong) or
// NaN (cannot be judged). A sample that cannot be judged does not count as drawn, and a prompt with
// fewer than k others is left out; NaN if that leaves no prompt. Throws Error unless `correct` is
// one or more groups of num_generations.
double mean_pass_at_k(std::span<const double> correct, int64_t num_generations, int64_t k);

}  // namespace cohort
