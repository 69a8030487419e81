// The binomial quotient is a product of k factors, none of which can overflow.
#include "rl/evaluate.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "data/tasks/tasks.h"
#include "rl/rewards/math_answer.h"
#include "rl/rewards/rewards.h"

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

MeanScore mean_score(std::span<const double> values) {
  double sum = 0, squares = 0, count = 0;
  for (const double value : values)
    if (!std::isnan(value)) {
      sum += value;
      ++count;
    }
  const double mean = count > 0 ? sum / count : std::nan("");
  for (const double value : values)
    if (!std::isnan(value)) squares += (value - mean) * (value - mean);
  if (count < 2) return {mean, std::nan("")};
  if (mean == 0 || mean == 1) return {mean, 1 / (2 * (count + 1))};
  return {mean, std::sqrt(squares / (count * (count - 1)))};
}

std::vector<double> pass_at_k_of_prompts(std::span<const double> correct, int64_t num_generations,
                                         int64_t k) {
  const auto size = static_cast<int64_t>(correct.size());
  COHORT_CHECK(num_generations > 0 && size > 0 && size % num_generations == 0,
               "[pass_at_k] expected groups of ", num_generations, ", got ", size, " values");
  std::vector<double> out;
  for (int64_t begin = 0; begin < size; begin += num_generations) {
    int64_t judged = 0, right = 0;
    for (int64_t i = begin; i < begin + num_generations; ++i) {
      const double verdict = correct[static_cast<size_t>(i)];
      judged += !std::isnan(verdict);
      right += verdict == 1;
    }
    out.push_back(judged < k ? std::nan("") : pass_at_k(judged, right, k));
  }
  return out;
}

double majority_at_k(std::span<const std::string> answers, std::span<const double> correct,
                     int64_t k) {
  COHORT_CHECK(k > 0 && answers.size() == correct.size(), "[majority_at_k] expected a verdict on ",
               answers.size(), " answers and a positive k, got ", correct.size(), " and ", k);
  struct Votes {
    const std::string& answer;
    double verdict;
    int64_t count;
  };
  std::vector<Votes> votes;  // in the order of the first occurrence
  for (size_t i = 0; i < answers.size() && k > 0; ++i) {
    if (std::isnan(correct[i])) continue;
    --k;
    const auto same =
        std::ranges::find_if(votes, [&](const Votes& v) { return v.answer == answers[i]; });
    if (same != votes.end())
      ++same->count;
    else
      votes.push_back({answers[i], correct[i], 1});
  }
  return k > 0 ? std::nan("") : std::ranges::max_element(votes, {}, &Votes::count)->verdict;
}

AnswerFn make_answer(const RewardConfig& config) {
  const bool is_math = config.name == "math", normalises = is_math || config.name == "numeric";
  const AnswerFinder finder(config.name == "format" || config.name == "judge" ? ""
                                                                              : config.pattern);
  return [=](std::string_view completion) {
    auto found = finder.find(completion);
    if (found && is_math) found = final_answer(*found);
    const std::string answer = found ? *found : std::string(completion);
    return normalises && found ? normalised_answer(answer) : std::string(trimmed(answer));
  };
}

}  // namespace cohort
