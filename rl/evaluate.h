// Pass rates and majority votes on held-out problems.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cohort {

struct RewardConfig;

// Unbiased pass@k from n samples of which c are correct: 1 - C(n - c, k) / C(n, k) (Chen et al.
// 2021). Throws Error unless 1 <= k <= n and 0 <= c <= n.
double pass_at_k(int64_t n, int64_t c, int64_t k);

// Mean of the values from 0 to 1 that are not NaN, and its standard error sqrt(sum (x - mean)^2 /
// (n (n - 1))). Where all are 0 or all are 1, that would be 0: it is then half the width of the
// Wilson interval of one standard deviation, 1 / (2 (n + 1)). NaN without values, and without an
// error for a single one.
struct MeanScore {
  double mean, error;
};
MeanScore mean_score(std::span<const double> values);

// pass@k of each prompt. `correct` has, per sampled completion, 1 (correct), 0 (wrong) or NaN (not
// judged). Samples that are not judged do not count, and a prompt with fewer than k judged samples
// has NaN. Throws Error unless the size of `correct` is a positive multiple of num_generations.
std::vector<double> pass_at_k_of_prompts(std::span<const double> correct, int64_t num_generations,
                                         int64_t k);

// maj@k of one prompt: the verdict (1 or 0) on the most frequent answer among the first k judged
// samples; of equally frequent ones, on the answer that occurs first. Equal answers have the
// verdict on the first of them. NaN with fewer than k judged samples.
double majority_at_k(std::span<const std::string> answers, std::span<const double> correct,
                     int64_t k);

// Returns the answer of a completion by which a majority is counted: the text that the reward's
// pattern finds in it (math: its final answer; math and numeric: normalised), or the trimmed
// completion if there is none. Throws InputError for a bad pattern.
using AnswerFn = std::function<std::string(std::string_view completion)>;
AnswerFn make_answer(const RewardConfig& config);

}  // namespace cohort
