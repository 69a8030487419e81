// Countdown: reach a target from given numbers with + - * / and parentheses.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace cohort {

// True if `expression` uses every number exactly once (as often as it is listed) and its exact
// value is the target. Only digits, + - * / ( ) and spaces may occur; there is no unary minus.
// Division is exact and may pass through fractions. Safe on any text; also false for a division by
// zero, int64 overflow, more than 1024 bytes or 64 nested parentheses.
bool countdown_solved(std::span<const int64_t> numbers, int64_t target,
                      std::string_view expression);

}  // namespace cohort
