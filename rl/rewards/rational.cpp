// Arithmetic of fractions with overflow checks.
#include "rl/rewards/rational.h"

#include <string>

namespace cohort {
namespace {

using Wide = Rational::Wide;
constexpr size_t kMaxDigits = 38;  // 10^38 fits into 128 bits

Rational reduced(Wide num, Wide den, bool negative) {
  Wide a = num, b = den;
  while (b != 0) {
    const Wide rest = a % b;
    a = b;
    b = rest;
  }
  return {num / a, den / a, negative && num != 0};
}

// Moves the leading digits of `text` to the end of `digits`.
void take_digits(std::string_view& text, std::string& digits) {
  size_t n = 0;
  while (n < text.size() && is_digit(text[n])) ++n;
  digits += text.substr(0, n);
  text.remove_prefix(n);
}

bool starts_with_group(std::string_view text) {  // ",234"
  return text.size() >= 4 && text[0] == ',' && is_digit(text[1]) && is_digit(text[2]) &&
         is_digit(text[3]) && (text.size() == 4 || !is_digit(text[4]));
}

}  // namespace

std::optional<Rational> add(const Rational& a, const Rational& b) {
  Wide left, right, num, den;
  if (__builtin_mul_overflow(a.num, b.den, &left)) return {};
  if (__builtin_mul_overflow(b.num, a.den, &right)) return {};
  if (__builtin_mul_overflow(a.den, b.den, &den)) return {};
  if (a.negative != b.negative)
    return left > right ? reduced(left - right, den, a.negative)
                        : reduced(right - left, den, b.negative);
  if (__builtin_add_overflow(left, right, &num)) return {};
  return reduced(num, den, a.negative);
}

std::optional<Rational> multiply(const Rational& a, const Rational& b) {
  Wide num, den;
  if (__builtin_mul_overflow(a.num, b.num, &num)) return {};
  if (__builtin_mul_overflow(a.den, b.den, &den)) return {};
  return reduced(num, den, a.negative != b.negative);
}

std::optional<Rational> divide(const Rational& a, const Rational& b) {
  if (b.num == 0) return {};
  return multiply(a, {b.den, b.num, b.negative});
}

std::optional<Rational> power(const Rational& base, int64_t exponent) {
  std::optional<Rational> result = Rational{1, 1}, square = base;
  const auto bits = static_cast<uint64_t>(exponent);
  for (uint64_t left = exponent < 0 ? 0 - bits : bits; left != 0 && result; left >>= 1) {
    if (left & 1) result = square ? multiply(*result, *square) : std::nullopt;
    if (square) square = multiply(*square, *square);
  }
  return result && exponent < 0 ? divide({1, 1}, *result) : result;
}

Rational negated(Rational a) {
  a.negative = !a.negative && a.num != 0;
  return a;
}

double to_double(const Rational& a) {
  const double size = static_cast<double>(a.num) / static_cast<double>(a.den);
  return a.negative ? -size : size;
}

std::optional<Rational> take_decimal(std::string_view& text) {
  std::string digits, fraction;
  take_digits(text, digits);
  if (digits.size() >= 1 && digits.size() <= 3 && digits[0] != '0') {
    for (; starts_with_group(text); text.remove_prefix(4)) digits += text.substr(1, 3);
  }
  if (text.size() >= 2 && text[0] == '.' && is_digit(text[1])) {
    text.remove_prefix(1);
    take_digits(text, fraction);
  }
  if (digits.empty() && fraction.empty()) return {};
  fraction.resize(fraction.find_last_not_of('0') + 1);
  digits += fraction;
  digits.erase(0, digits.find_first_not_of('0'));
  if (digits.size() > kMaxDigits || fraction.size() > kMaxDigits) return {};
  Wide num = 0, den = 1;
  for (const char c : digits) num = num * 10 + static_cast<Wide>(c - '0');
  for (size_t i = 0; i < fraction.size(); ++i) den *= 10;
  return reduced(num, den, false);
}

}  // namespace cohort
