// Regular expressions (PCRE2, UTF-8) with bounded work: a hostile completion cannot hang a reward.
// \w, \d and \s mean ASCII characters, unless the pattern begins with (*UCP).
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort {

class Regex {
 public:
  // Throws InputError with the pattern and the position of the fault.
  explicit Regex(const std::string& pattern);

  // True if the whole text matches. Invalid UTF-8 and texts that exceed the match limits do not
  // match.
  bool full_match(std::string_view text) const;
  // Capture groups of the last of the matches that are found from left to right, without overlaps:
  // [0] is the whole match; an unset group is "".
  std::optional<std::vector<std::string>> find_last(std::string_view text) const;

 private:
  std::shared_ptr<const void> code_;  // the compiled pattern
};

}  // namespace cohort
