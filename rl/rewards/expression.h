// Evaluation of expressions of numbers in plain text or LaTeX.
#pragma once

#include <optional>
#include <string_view>

#include "rl/rewards/rational.h"

namespace cohort {

struct Number {
  std::optional<Rational> exact;  // nullopt for roots, pi and overflow of 128 bits
  double approx = 0;              // finite
};

// Supports + - * / ^ ! and parentheses or braces; \frac, \sqrt[n], sqrt, \pi, pi; decimals with
// exponents, as in 1e-3, and thousands separators, unless a bracket is beside them: (1,234) is a
// pair; products without a sign, as in 2\pi; mixed numbers, as in 3\frac{1}{2} or 3 1/2 (an integer
// before a proper fraction is added to it). A chain a = b = c has its last value. Returns nullopt
// for any other text, an undefined or infinite value, over 1024 bytes or 64 nested parts.
// `too_large` becomes true if the text exceeds these limits, a double, or 128 bits where a number
// or a result of + - * / ^ ! would be exact.
std::optional<Number> expression_value(std::string_view text, bool* too_large = nullptr);

// Compares exactly if both are exact, otherwise to within 1e-9 of the larger.
bool same_number(const Number& a, const Number& b);

}  // namespace cohort
