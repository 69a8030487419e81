// Pass rates on held-out problems.
#pragma once

#include <cstdint>
#include <span>

namespace cohort {

// Unbiased pass@k from n samples of which c are correct: 1 - C(n - c, k) / C(n, k) (Chen et al.
// 2021). Throws Error unless 1 <= k <= n and 0 <= c <= n.
double pass_at_k(int64_t n, int64_t c, int64_t k);

// Mean pass@k over prompts. `correct` has, per sampled completion, 1 (correct), 0 (wrong) or NaN
// (not judged). Samples that are not judged do not count, and a prompt with fewer than k judged
// samples is left out; NaN if that leaves no prompt. Throws Error unless the size of `correct` is a
// positive multiple of num_generations.
double mean_pass_at_k(std::span<const double> correct, int64_t num_generations, int64_t k);

}  // namespace cohort
