// Regular expressions (PCRE2, UTF-8) with bounded work: a hostile completion cannot hang a reward.
// \w, \d and \s mean ASCII characters, unless the pattern begins with (*UCP) or is told to be
// Unicode's.
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
  // Throws InputError with the pattern and the position of the fault.
  explicit Regex(const std::string& pattern, Classes classes = Classes::kAscii);

  // True if the whole text matches. Invalid UTF-8 and texts that exceed the match limits do not
  // match.
  bool full_match(std::string_view text) const;
  // Capture groups of the last of the matches that are found from left to right, without overlaps:
  // [0] is the whole match; an unset group is "".
  std::optional<std::vector<std::string>> find_last(std::string_view text) const;
  // found(begin, end) for every match from left to right, without overlaps. Takes what it does from
  // `work`, of which some 300 units a character are usual, and throws InputError where that is not
  // enough.
  void find_all(std::string_view text, int64_t& work,
                const std::function<void(size_t, size_t)>& found) const;

 private:
  std::shared_ptr<const void> code_;  // the compiled pattern
};

}  // namespace cohort
