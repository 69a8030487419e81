// Text for messages and files: suggestions for mistyped names, and numbers.
#pragma once

#include <span>
#include <string>

namespace cohort {

// The candidate with the smallest edit distance to `word`, or "" if none is close enough to be a
// typo.
std::string nearest_name(const std::string& word, std::span<const std::string> candidates);
// Shortest decimal text that parses to the same double ("0.001", "1e-08").
std::string format_double(double value);

}  // namespace cohort
