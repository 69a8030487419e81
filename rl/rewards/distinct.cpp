// distinct: measures repetition by the number of distinct runs of four words in the text found in
// the completion over the number of all of its runs (distinct-n, Li et al. 2016). 0 for a shorter
// text.
#include <set>

#include "rl/rewards/rewards.h"

namespace cohort {
namespace {

constexpr size_t kRun = 4;

std::vector<std::string_view> words_of(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n";
  std::vector<std::string_view> words;
  for (size_t at = text.find_first_not_of(kSpace); at != text.npos;) {
    const size_t end = std::min(text.find_first_of(kSpace, at), text.size());
    words.push_back(text.substr(at, end - at));
    at = text.find_first_not_of(kSpace, end);
  }
  return words;
}

}  // namespace

RewardFn make_distinct(const RewardConfig& config, const Task*) {
  return [finder = AnswerFinder(config.pattern)](const RewardInput& in) {
    const auto found = finder.find(in.completion);
    if (!found) return 0.0;
    const std::vector<std::string_view> words = words_of(*found);
    if (words.size() < kRun) return 0.0;
    std::set<std::vector<std::string_view>> runs;
    const size_t count = words.size() - kRun + 1;
    for (size_t i = 0; i < count; ++i)
      runs.emplace(words.begin() + static_cast<std::ptrdiff_t>(i),
                   words.begin() + static_cast<std::ptrdiff_t>(i + kRun));
    return static_cast<double>(runs.size()) / static_cast<double>(count);
  };
}

}  // namespace cohort
