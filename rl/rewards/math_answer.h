// Final answers in mathematics: where they stand in a text, and when two of them are the same.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace cohort {

// The final answer of a solution, a completion or an answer alone: the first of these there is.
//   1. What the last \boxed{...} or \fbox{...} holds; "\boxed 5" too. One that never closes is none
//      (last_boxed_only_string() of hendrycks/math).
//   2. What follows the last "####" on its line (GSM8K, Cobbe et al. 2021).
//   3. Of what follows the last "answer is" or "answer:", up to the end of the sentence, the first
//      of the next three, else all of it.
//   4. The last $...$, $$...$$, \(...\) or \[...\]; of an equation what follows the last "=" that
//      is in no bracket. A "$" before a digit closes nothing and one after a digit opens nothing:
//      they may belong to prices.
//   5. A whole line of at most three words (of two letters or more), none of them before its first
//      digit, such as "x^2 + 1", "6 and 8" or "18 eggs".
//   6. The last expression of numbers without spaces, or the last number.
// Nothing where that is over 1024 bytes.
std::optional<std::string> final_answer(std::string_view text);

// An answer in the one notation that answers are compared in: that of _strip_string() in
// hendrycks/math (Hendrycks et al. 2021), and without thousands separators and units behind a
// number, as normalize_final_answer() of Minerva (Lewkowycz et al. 2022). Unlike there, spaces
// between digits stay ("1 2" is not "12"), and text that joins two answers is no unit.
std::string normalised_answer(std::string_view answer);

// True if the normalised answers are the same text, or expressions of the same number: 2^3 is 8.
bool same_answer(std::string_view a, std::string_view b);

}  // namespace cohort
