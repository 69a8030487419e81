// Final answers in mathematics: their extraction from a text and their comparison.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace cohort {

// Returns the final answer of a solution, a completion or a plain answer, by the first rule that
// applies:
//   1. The content of the last \boxed{...} or \fbox{...}; "\boxed 5" too. Unclosed boxes are
//      ignored (last_boxed_only_string() of hendrycks/math). If it is empty, there is no answer.
//   2. The rest of the line after the last "####" (GSM8K, Cobbe et al. 2021), unless it is prose.
//   3. The rest of the sentence after the last "answer is" or "answer:", with a display formula
//      below it, reduced by the first of the next three rules that applies to it.
//   4. The last $...$, $$...$$, \(...\), \[...\], align or equation environment; of an equation,
//      the part after the last "=" that is not in a bracket. A "$" before a digit does not close,
//      and a "$" after a digit does not open a formula, since they may belong to prices.
//   5. The whole text if it is a line of at most three words (of two letters or more), none of them
//      before its first digit, such as "x^2 + 1", "6 and 8" or "18 eggs". The dash of a list's item
//      is left out.
//   6. The last expression of numbers without spaces, list of numbers in brackets, mixed number, or
//      number, with the words after it that scale it ("5 million").
// Characters outside of ASCII that have a spelling in ASCII or LaTeX have it in the answer.
// Returns nullopt if the answer is longer than 1024 bytes.
std::optional<std::string> final_answer(std::string_view text);

// Normalises an answer for comparison: by the rules of _strip_string() in hendrycks/math (Hendrycks
// et al. 2021), and without thousands separators, units after a number and names before "=", as
// normalize_final_answer() of Minerva (Lewkowycz et al. 2022). Unlike there, spaces between digits
// are kept ("1 2" is not "12"), words that scale become factors, and others that are no unit, such
// as a conjunction between two answers, stay.
std::string normalised_answer(std::string_view answer);

// True if the normalised answers are the same text, expressions of the same number (2^3 and 8), or
// lists of such in the same brackets, sets in any order; and neither the units (with exponents, so
// that cm^2 is not cm^3) nor the names of more than two letters differ where both have one. "50%"
// is 50 and 50 percent, which is 0.5.
bool same_answer(std::string_view a, std::string_view b);

}  // namespace cohort
