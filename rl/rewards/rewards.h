// What the files of rl/rewards/ share: one maker each for the table in rl/reward.cpp, and the way
// to an answer inside a completion.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "data/regex.h"
#include "rl/reward.h"

namespace cohort {

RewardFn make_countdown(const RewardConfig& config, const Task* task);
RewardFn make_exact_match(const RewardConfig& config, const Task* task);
RewardFn make_format(const RewardConfig& config, const Task* task);
RewardFn make_numeric(const RewardConfig& config, const Task* task);
RewardFn make_task(const RewardConfig& config, const Task* task);

// Where the answer is: group 1 of the pattern's last match (the whole match if the pattern has no
// group), or the whole text if the pattern is empty.
class AnswerFinder {
 public:
  // Throws InputError for a bad pattern.
  explicit AnswerFinder(const std::string& pattern);
  // Nothing if the pattern does not match.
  std::optional<std::string> find(std::string_view text) const;

 private:
  std::shared_ptr<const Regex> regex_;  // null: no pattern
};

}  // namespace cohort
