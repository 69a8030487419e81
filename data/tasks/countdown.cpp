// The countdown task: a recursive descent checker over exact fractions, and a generator that builds
// a random expression first and asks for its value, so that a solution always exists.
#include "data/tasks/countdown.h"

#include <algorithm>
#include <charconv>
#include <numeric>
#include <optional>

#include "data/tasks/tasks.h"

namespace cohort {
namespace {

constexpr size_t kMaxLength = 1024;
constexpr int kMaxDepth = 64;
constexpr int64_t kMaxNumber = 99, kMaxValue = 999;

struct Fraction {
  int64_t num, den;  // lowest terms, den > 0
};

// a op b; nullopt if it is undefined or overflows int64.
std::optional<Fraction> apply(char op, Fraction a, Fraction b) {
  if (op == '/') {
    if (b.num == 0) return {};
    b = b.num > 0 ? Fraction{b.den, b.num} : Fraction{-b.den, -b.num};
  }
  __extension__ using Wide = __int128;  // holds every result
  const bool adds = op == '+' || op == '-';
  const Wide left = Wide{a.num} * (adds ? b.den : b.num), right = adds ? Wide{b.num} * a.den : 0;
  const Wide num = op == '-' ? left - right : left + right, den = Wide{a.den} * b.den;
  for (const Wide part : {left, right, num, den})
    if (part != static_cast<int64_t>(part)) return {};
  if (num == INT64_MIN) return {};  // gcd() and the division above negate it
  const int64_t divisor = std::gcd(static_cast<int64_t>(num), static_cast<int64_t>(den));
  return Fraction{static_cast<int64_t>(num) / divisor, static_cast<int64_t>(den) / divisor};
}

// sum := product (('+' | '-') product)*; product := atom (('*' | '/') atom)*; atom := number | '('
// sum ')'. Every method returns nullopt on the first error.
class Parser {
 public:
  explicit Parser(std::string_view text) : rest_(text) {}

  std::optional<Fraction> parse() {
    const auto value = sum();
    skip_spaces();
    return rest_.empty() ? value : std::nullopt;
  }
  const std::vector<int64_t>& used() const { return used_; }

 private:
  std::optional<Fraction> sum() {
    return operations("+-", [&] { return operations("*/", [&] { return atom(); }); });
  }
  // Operands with any of the operators between them, from left to right.
  template <class TakeOperand>
  std::optional<Fraction> operations(std::string_view operators, const TakeOperand& take_operand) {
    auto value = take_operand();
    for (char op; value && (op = take_one_of(operators));) {
      const auto right = take_operand();
      value = right ? apply(op, *value, *right) : std::nullopt;
    }
    return value;
  }
  std::optional<Fraction> atom() {
    if (!take_one_of("(")) return number();
    if (++depth_ > kMaxDepth) return {};
    const auto value = sum();
    --depth_;
    return take_one_of(")") ? value : std::nullopt;
  }
  std::optional<Fraction> number() {
    int64_t value = 0;
    // from_chars accepts a sign.
    if (rest_.empty() || rest_[0] < '0' || rest_[0] > '9') return {};
    const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
    if (error != std::errc()) return {};
    const auto length = static_cast<size_t>(end - rest_.data());
    if (rest_[0] == '0' && length > 1) return {};
    rest_.remove_prefix(length);
    used_.push_back(value);
    return Fraction{value, 1};
  }
  void skip_spaces() { rest_.remove_prefix(std::min(rest_.find_first_not_of(' '), rest_.size())); }
  // The next character if it is one of `wanted`, else 0. Skips spaces around it.
  char take_one_of(std::string_view wanted) {
    skip_spaces();
    if (rest_.empty() || wanted.find(rest_[0]) == wanted.npos) return 0;
    const char c = rest_[0];
    rest_.remove_prefix(1);
    skip_spaces();
    return c;
  }

  std::string_view rest_;
  std::vector<int64_t> used_;
  int depth_ = 0;
};

// A generated subexpression. Its top operator decides where parentheses are needed.
struct Term {
  int64_t value;
  std::string text;
  char op;  // 0 for a number
};

int precedence(char op) {
  return op == 0 ? 2 : op == '*' || op == '/' ? 1 : 0;
}

Term combine(const Term& a, char op, const Term& b, int64_t value) {
  const auto wrapped = [](const Term& t, bool wrap) { return wrap ? "(" + t.text + ")" : t.text; };
  const bool strict = op == '-' || op == '/';  // a-(b+c) is not a-b+c
  const std::string left = wrapped(a, precedence(a.op) < precedence(op));
  const std::string right = wrapped(
      b, precedence(b.op) < precedence(op) || (strict && precedence(b.op) == precedence(op)));
  return {value, left + op + right, op};
}

// Applies a random operation whose result is an integer from 1 to kMaxValue. There always is one:
// the difference of two different values, the quotient of equal ones.
Term combine(Rng& rng, Term a, Term b) {
  if (a.value < b.value) std::swap(a, b);
  std::vector<Term> choices;
  const auto offer = [&](char op, int64_t value) {
    if (value >= 1 && value <= kMaxValue) choices.push_back(combine(a, op, b, value));
  };
  offer('+', a.value + b.value);
  offer('-', a.value - b.value);
  offer('*', a.value * b.value);
  if (a.value % b.value == 0) offer('/', a.value / b.value);
  return choices[static_cast<size_t>(rng.below(static_cast<int64_t>(choices.size())))];
}

Example generate(Rng& rng, const TaskConfig& config) {
  const int64_t count = rng.between(config.min_size, config.max_size);
  std::vector<Term> terms;
  std::vector<int64_t> sorted;
  Json numbers = Json::Array{};
  std::string prompt;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t number = rng.between(1, kMaxNumber);
    terms.push_back({number, std::to_string(number), 0});
    numbers.push_back(number);
    sorted.push_back(number);
    prompt += std::to_string(number) + " ";
  }
  const auto take = [&] {
    const auto i = rng.below(static_cast<int64_t>(terms.size()));
    Term term = std::move(terms[static_cast<size_t>(i)]);
    terms.erase(terms.begin() + i);
    return term;
  };
  while (terms.size() > 1) {
    Term a = take(), b = take();
    terms.push_back(combine(rng, std::move(a), std::move(b)));
  }
  const int64_t target = terms[0].value;
  // Problems that differ only in the order of their numbers are in the same split.
  std::sort(sorted.begin(), sorted.end());
  std::string key;
  for (const int64_t number : sorted) key += std::to_string(number) + " ";
  const std::string end = str("-> ", target, "\n");
  Json fields = Json::Object{};
  fields.set("numbers", numbers).set("target", target);
  return {.prompt = prompt + end,
          .answer = std::to_string(target),
          .solution = terms[0].text,
          .fields = fields,
          .split_key = key + end};
}

double check(const Example& example, std::string_view completion) {
  std::vector<int64_t> numbers;
  for (const Json& n : example.fields.at("numbers").as_array()) numbers.push_back(n.as_int());
  const int64_t target = example.fields.at("target").as_int();
  return countdown_solved(numbers, target, trimmed(completion)) ? 1 : 0;
}

}  // namespace

bool countdown_solved(std::span<const int64_t> numbers, int64_t target,
                      std::string_view expression) {
  if (expression.size() > kMaxLength) return false;
  Parser parser(expression);
  const auto value = parser.parse();
  return value && value->den == 1 && value->num == target &&
         std::ranges::is_permutation(numbers, parser.used());
}

const Task kCountdownTask = {
    .name = "countdown",
    .description =
        "\"3 7 25 -> 46\\n\" wants \"3*7+25\", each number used once; size: how many numbers",
    .alphabet = "0123456789 ->\n+*/()",
    .min_size = 2,
    .max_size = 6,
    .generate = generate,
    .check = check,
};

}  // namespace cohort
