// The table of rewards, and the search for an answer in a completion.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "rl/reward.h"
#include "text/regex.h"

namespace cohort {

// A new reward is the file rl/rewards/<name>.cpp, which defines make_<name>(), and a line here.
#define COHORT_REWARDS(R)                                                      \
  R(command, "computed by an external program: run")                           \
  R(contains, "the found text contains the answer")                            \
  R(countdown, "an expression that reaches fields.target from fields.numbers") \
  R(distinct, "the fraction of distinct runs of four words")                   \
  R(exact_match, "the found text is the answer")                               \
  R(format, "the pattern matches the whole completion")                        \
  R(math, "the final answer is the answer, as text or as a number")            \
  R(numeric, "the found number equals the answer")                             \
  R(task, "the generated task's own checker")                                  \
  R(think_format, "<think>...</think> comes first, once")

#define COHORT_DECLARE_REWARD(name, description) \
  RewardFn make_##name(const RewardConfig& config, const Task* task);
COHORT_REWARDS(COHORT_DECLARE_REWARD)
#undef COHORT_DECLARE_REWARD

// Finds the answer in a text: group 1 of the pattern's last match (the whole match if the pattern
// has no group), or the whole text if the pattern is empty.
class AnswerFinder {
 public:
  // Throws InputError for a bad pattern.
  explicit AnswerFinder(const std::string& pattern);
  // Returns nullopt if the pattern does not match.
  std::optional<std::string> find(std::string_view text) const;

 private:
  std::shared_ptr<const Regex> regex_;  // null: no pattern
};

}  // namespace cohort
