// Final answers in mathematics: their extraction from a text and their comparison.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace cohort {

// Returns the final answer of a solution, a completion or a plain answer, by the first rule that
// applies:
//   1. The content of the last \boxed{...} or \fbox{...}; "\boxed 5" too. Unclosed boxes are
//      ignored (last_boxed_only_string() of hendrycks/math).
//   2. The rest of the line after the last "####" (GSM8K, Cobbe et al. 2021).
//   3. The rest of the sentence after the last "answer is" or "answer:", reduced by the first of
//      the next three rules that applies to it.
//   4. The last $...$, $$...$$, \(...\) or \[...\]; of an equation, the part after the last "="
//      that is not in a bracket. A "$" before a digit does not close, and a "$" after a digit does
//      not open a formula, since they may belong to prices.
//   5. The whole text if it is a line of at most three words (of two letters or more), none of them
//      before its first digit, such as "x^2 + 1", "6 and 8" or "18 eggs".
//   6. The last expression of numbers without spaces, or the last number.
// Returns nullopt if the answer is longer than 1024 bytes.
std::optional<std::string> final_answer(std::string_view text);

// Normalises an answer for comparison: by the rules of _strip_string() in hendrycks/math (Hendrycks
// et al. 2021), and without thousands separators and units after a number, as
// normalize_final_answer() of Minerva (Lewkowycz et al. 2022). Unlike there, spaces between digits
// are kept ("1 2" is not "12"), and a conjunction between two answers is not a unit.
std::string normalised_answer(std::string_view answer);

// True if the normalised answers are the same text, or expressions of the same number (2^3 and 8).
bool same_answer(std::string_view a, std::string_view b);

}  // namespace cohort
