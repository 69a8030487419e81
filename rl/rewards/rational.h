// Exact fractions of 128-bit integers, for rewards that compare numbers.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace cohort {

// Lowest terms and no negative zero, so that equal numbers have equal fields.
struct Rational {
  using Wide = unsigned __int128;
  Wide num = 0, den = 1;
  bool negative = false;
  bool operator==(const Rational&) const = default;
};

// Each returns nullopt on overflow or division by zero.
std::optional<Rational> add(const Rational& a, const Rational& b);
std::optional<Rational> multiply(const Rational& a, const Rational& b);
std::optional<Rational> divide(const Rational& a, const Rational& b);
std::optional<Rational> power(const Rational& base, int64_t exponent);  // 0^0 is 1

Rational negated(Rational a);
double to_double(const Rational& a);

constexpr bool is_digit(char c) {
  return c >= '0' && c <= '9';
}
// Removes an unsigned decimal, such as "1,234.50" or ".5", from the front of `text`. Commas belong
// to it between one to three digits, without a leading zero, and groups of exactly three. Returns
// nullopt if there is none, or if it has more than 38 significant digits.
std::optional<Rational> take_decimal(std::string_view& text);

}  // namespace cohort
