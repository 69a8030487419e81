// Text for messages and files: suggestions for mistyped names, and numbers.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace cohort {

// Returns "; did you mean 'NAME'?" for the candidate with the smallest edit distance to `word`, or
// `otherwise` if `word` is a typo of none.
std::string did_you_mean(const std::string& word, std::span<const std::string> candidates,
                         const std::string& otherwise = "");
std::string join(const std::vector<std::string>& words, const std::string& separator);
// Shortest decimal text that parses to the same double ("0.001", "1e-08").
std::string format_double(double value);

}  // namespace cohort
