// Regular expressions (PCRE2, UTF-8) with bounded work: a hostile completion cannot hang a reward.
// \w, \d and \s match ASCII characters, unless the pattern begins with (*UCP) or Classes::kUnicode
// is given.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort {

class Regex {
 public:
  // kUnicode: \w, \d and \s as Unicode defines them (UTS #18; \s is White_Space), and ^ and $ at
  // every line, as tokenizers write their patterns.
  enum class Classes { kAscii, kUnicode };
  // Throws InputError with the pattern and the position of the error.
  explicit Regex(const std::string& pattern, Classes classes = Classes::kAscii);

  // True if the whole text matches. Invalid UTF-8 and texts that exceed the match limits do not
  // match.
  bool full_match(std::string_view text) const;
  // Capture groups of the last non-overlapping match, scanning from left to right: [0] is the whole
  // match; an unset group is "".
  std::optional<std::vector<std::string>> find_last(std::string_view text) const;
  // Calls found(begin, end) for every non-overlapping match from left to right. Subtracts its cost
  // from the budget `work`, usually some 300 units a character. Throws InputError if the budget is
  // exceeded.
  void find_all(std::string_view text, int64_t& work,
                const std::function<void(size_t, size_t)>& found) const;

 private:
  std::shared_ptr<const void> code_;  // the compiled pattern
};

}  // namespace cohort
