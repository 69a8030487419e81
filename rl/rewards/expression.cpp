// A recursive descent parser that evaluates while it parses.
#include "rl/rewards/expression.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numbers>

namespace cohort {
namespace {

constexpr size_t kMaxLength = 1024;
constexpr int kMaxDepth = 64;
constexpr double kTolerance = 1e-9;
constexpr unsigned kMaxFactorial = 170;  // the largest whose factorial is a finite double
constexpr unsigned kMaxExponent = 1'000'000'000;

// The exact result if there is one, else the double.
Number number_of(const std::optional<Rational>& exact, double approx) {
  return {exact, exact ? to_double(*exact) : approx};
}

std::optional<Rational> whole_power(const Rational& base, const Rational& exponent) {
  if (exponent.den != 1 || exponent.num > kMaxExponent) return {};
  const auto size = static_cast<int64_t>(exponent.num);
  return power(base, exponent.negative ? -size : size);
}

template <class Approx>
Number combine(const Number& a, const Number& b, decltype(whole_power)* exact, Approx approx) {
  return number_of(a.exact && b.exact ? exact(*a.exact, *b.exact) : std::nullopt,
                   approx(a.approx, b.approx));
}

// sum := product (('+' | '-') product)*
// product := factor (['*' | '/'] factor)*
// factor := ('-' | '+') factor | atom '!'* ['^' factor]
// An error sets failed_, after which values are undefined. Every recursion passes through factor().
class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text), rest_(text) {}

  std::optional<Number> parse() {
    Number value = sum();
    while (take("=")) value = sum();
    skip_spaces();
    if (failed_ || !rest_.empty()) return {};
    return value;
  }
  bool too_large() const { return too_large_; }

 private:
  Number sum() {
    Number value = product();
    while (!failed_) {
      if (take("+"))
        value = plus(value, product());
      else if (take("-"))
        value = plus(value, minus(product()));
      else
        break;
    }
    return value;
  }

  Number product() {
    Number value = factor();
    while (!failed_) {
      if (take("/"))
        value = over(value, factor());
      else if (take("*") || starts_factor())
        value = times(value, factor());
      else
        break;
    }
    return value;
  }

  Number factor() {
    if (++depth_ > kMaxDepth) return fail_too_large();
    Number value;
    if (take("-")) {
      value = minus(factor());
    } else if (take("+")) {
      value = factor();
    } else {
      value = atom();
      while (!failed_ && take("!")) value = factorial(value);
      if (take("^")) value = raised(value, factor());
    }
    --depth_;
    return value;
  }

  Number atom() {
    if (take("(")) return closed_by(")");
    if (take("{")) return closed_by("}");
    if (take("\\frac")) return fraction();
    if (take("\\sqrt")) return root();
    if (take("sqrt")) return root_of(at_digit() ? literal() : argument(), 2);
    if (take("\\pi") || take("pi")) return {{}, std::numbers::pi};
    return literal();
  }

  Number closed_by(std::string_view closer) {
    const Number value = sum();
    return take(closer) ? value : fail();
  }

  // An argument of a LaTeX command: a group, one digit, or another command.
  Number argument() {
    if (take("{")) return closed_by("}");
    if (take("(")) return closed_by(")");
    if (!at_digit()) return factor();
    std::string_view digit = rest_.substr(0, 1);
    rest_.remove_prefix(1);
    return number_of(take_decimal(digit), 0);
  }

  Number fraction() {
    const Number numerator = argument();
    return over(numerator, argument());
  }

  Number root() {
    const double degree = take("[") ? closed_by("]").approx : 2;
    return root_of(argument(), degree);
  }

  Number root_of(const Number& radicand, double degree) {
    const double value = radicand.approx;
    const bool flip = value < 0 && std::fmod(degree, 2) != 0;  // \sqrt[3]{-8}
    const Number exponent = checked({{}, 1 / degree});
    const double size = std::pow(flip ? -value : value, exponent.approx);
    return checked({{}, flip ? -size : size});
  }

  Number literal() {
    const std::string_view before = rest_;
    const auto decimal = take_decimal(rest_);
    if (!decimal) return rest_.size() < before.size() ? fail_too_large() : fail();
    const std::string_view digits = before.substr(0, before.size() - rest_.size());
    if (digits.find(',') != digits.npos && is_beside_bracket(digits)) return fail();
    const Number value = with_exponent(number_of(decimal, 0));
    if (digits.find('.') != digits.npos) return value;
    const std::string_view after = rest_;
    if (take("\\frac")) {
      const Number part = fraction();
      return is_proper(part) ? plus(value, part) : times(value, part);
    }
    // A mixed number, as in 3 1/2.
    if (!after.starts_with(' ') || !at_digit()) return value;
    const auto numerator = take_decimal(rest_);
    const auto denominator = rest_.starts_with('/') ? take("/"), take_decimal(rest_) : std::nullopt;
    if (!numerator || !denominator) return fail();
    const Number part = over(number_of(numerator, 0), number_of(denominator, 0));
    return is_proper(part) ? plus(value, part) : fail();
  }

  static bool is_proper(const Number& part) {
    return part.exact && part.exact->num < part.exact->den;
  }

  // True if digits of the text are the first or the last in a bracket.
  bool is_beside_bracket(std::string_view digits) const {
    const auto begin = static_cast<size_t>(digits.data() - text_.data());
    const size_t left = text_.substr(0, begin).find_last_not_of(' '),
                 right = text_.find_first_not_of(' ', begin + digits.size());
    return (left != text_.npos && (text_[left] == '(' || text_[left] == '[')) ||
           (right != text_.npos && (text_[right] == ')' || text_[right] == ']'));
  }

  // The value times the power of ten that follows: "e5", "E-3".
  Number with_exponent(const Number& value) {
    if (rest_.empty() || (rest_[0] != 'e' && rest_[0] != 'E')) return value;
    rest_.remove_prefix(1);
    const bool negative = rest_.starts_with('-');
    if (negative || rest_.starts_with('+')) rest_.remove_prefix(1);
    const bool has_digits = rest_.find_first_of("0123456789") == 0;
    const auto size = take_decimal(rest_);
    if (has_digits && !size) return fail_too_large();
    if (!size || size->den != 1) return fail();
    const Rational exponent{size->num, 1, negative};
    const Number out = times(value, raised({Rational{10, 1}, 10}, {exponent, to_double(exponent)}));
    return out.approx == 0 && value.approx != 0 ? fail() : out;  // underflow is no 0
  }

  Number factorial(const Number& n) {
    if (!n.exact || n.exact->negative || n.exact->den != 1) return fail();
    if (n.exact->num > kMaxFactorial) return fail_too_large();
    Number result{Rational{1, 1}, 1};
    for (unsigned i = 2; i <= n.exact->num; ++i)
      result = times(result, {Rational{i, 1}, static_cast<double>(i)});
    return result;
  }

  // The result of an operation that is exact for exact numbers of any size.
  Number exact(const Number& a, const Number& b, const Number& value) {
    too_large_ = too_large_ || (a.exact && b.exact && !value.exact);
    return checked(value);
  }
  Number plus(const Number& a, const Number& b) {
    return exact(a, b, combine(a, b, add, std::plus()));
  }
  Number times(const Number& a, const Number& b) {
    return exact(a, b, combine(a, b, multiply, std::multiplies()));
  }
  Number over(const Number& a, const Number& b) {
    return b.approx == 0 ? fail() : exact(a, b, combine(a, b, divide, std::divides()));
  }
  Number raised(const Number& a, const Number& b) {
    if (a.approx == 0 && b.approx < 0) return fail();
    const Number value =
        combine(a, b, whole_power, [](double x, double y) { return std::pow(x, y); });
    return b.exact && b.exact->den == 1 ? exact(a, b, value) : checked(value);
  }
  static Number minus(const Number& a) {
    return number_of(a.exact ? std::optional(negated(*a.exact)) : std::nullopt, -a.approx);
  }

  Number checked(const Number& value) {
    if (std::isinf(value.approx)) return fail_too_large();
    return std::isnan(value.approx) ? fail() : value;
  }
  Number fail_too_large() {
    too_large_ = true;
    return fail();
  }
  Number fail() {
    failed_ = true;
    return {};
  }

  void skip_spaces() { rest_.remove_prefix(std::min(rest_.find_first_not_of(' '), rest_.size())); }
  bool at_digit() {
    skip_spaces();
    return !rest_.empty() && is_digit(rest_[0]);
  }
  bool starts_factor() {
    skip_spaces();
    constexpr std::string_view kStarts[] = {"(", "\\frac", "\\sqrt", "\\pi", "sqrt", "pi"};
    return std::ranges::any_of(kStarts,
                               [&](std::string_view start) { return rest_.starts_with(start); });
  }
  bool take(std::string_view wanted) {
    skip_spaces();
    if (!rest_.starts_with(wanted)) return false;
    rest_.remove_prefix(wanted.size());
    return true;
  }

  const std::string_view text_;
  std::string_view rest_;
  int depth_ = 0;
  bool failed_ = false, too_large_ = false;
};

}  // namespace

std::optional<Number> expression_value(std::string_view text, bool* too_large) {
  Parser parser(text);
  const bool too_long = text.size() > kMaxLength;
  const std::optional<Number> value = too_long ? std::nullopt : parser.parse();
  if (too_large != nullptr) *too_large = too_long || parser.too_large();
  return value;
}

bool same_number(const Number& a, const Number& b) {
  if (a.exact && b.exact) return *a.exact == *b.exact;
  return std::abs(a.approx - b.approx) <=
         kTolerance * std::max(std::abs(a.approx), std::abs(b.approx));
}

}  // namespace cohort
