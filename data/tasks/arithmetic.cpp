// Arithmetic in steps: "((37+58)*41)-96=" wants "3799". A worked solution calls the calculator for
// each step, as the environment `tools` answers calls of the format inline, and then repeats the
// last result: "<<37+58>>95\n<<95*41>>3895\n<<3895-96>>3799\n3799". Only the last line is
// graded. A small model can learn to copy numbers but not to multiply them: with a worked_share
// below 1, it has to discover that calling the calculator pays.
#include "data/tasks/tasks.h"

namespace cohort {
namespace {

constexpr int64_t kLeast = 2, kMost = 99;     // operands
constexpr int64_t kMaxValue = 1'000'000'000;  // exclusive, of the size of every result

int64_t apply(char op, int64_t a, int64_t b) {
  return op == '+' ? a + b : op == '-' ? a - b : a * b;
}

Example generate(Rng& rng, const TaskConfig& config) {
  constexpr std::string_view kOperators = "+-*";
  const int64_t size = rng.between(config.min_size, config.max_size);
  int64_t value = rng.between(kLeast, kMost);
  std::string prompt(static_cast<size_t>(size - 1), '('), steps;
  prompt += std::to_string(value);
  for (int64_t i = 0; i < size; ++i) {
    const int64_t operand = rng.between(kLeast, kMost), before = value;
    char op = 0;
    do {
      op = kOperators[static_cast<size_t>(rng.below(std::ssize(kOperators)))];
      value = apply(op, before, operand);
    } while (value <= -kMaxValue || value >= kMaxValue);
    prompt += str(i == 0 ? "" : ")", op, operand);
    steps += str("<<", before, op, operand, ">>", value, "\n");
  }
  if (rng.uniform() >= config.worked_share) steps.clear();
  const std::string answer = std::to_string(value);
  return {.prompt = prompt + "=", .answer = answer, .solution = steps + answer};
}

double check(const Example& example, std::string_view completion) {
  completion = trimmed(completion);
  return check_answer(example, completion.substr(completion.rfind('\n') + 1));
}

}  // namespace

const Task kArithmeticTask = {
    .name = "arithmetic",
    .description =
        "\"(37+58)*41=\" wants \"3895\", after calls of the calculator as in \"<<37+58>>95\", a "
        "line "
        "each; size: operators",
    .alphabet = "0123456789+-*()=<>\n",
    .min_size = 1,
    .max_size = 8,
    .generate = generate,
    .check = check,
};

}  // namespace cohort
