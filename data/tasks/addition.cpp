// Addition: "47+85=" wants "132".
#include "data/tasks/tasks.h"

namespace cohort {
namespace {

// Uniform over the numbers of exactly `digits` digits.
int64_t random_number(Rng& rng, int64_t digits) {
  int64_t first = 1;
  for (int64_t i = 1; i < digits; ++i) first *= 10;
  return rng.between(digits == 1 ? 0 : first, first * 10 - 1);
}

Example generate(Rng& rng, const TaskConfig& config) {
  const int64_t digits = rng.between(config.min_size, config.max_size);
  const int64_t a = random_number(rng, digits), b = random_number(rng, digits);
  const std::string sum = std::to_string(a + b);
  return {.prompt = str(a, "+", b, "="), .answer = sum, .solution = sum};
}

}  // namespace

const Task kAdditionTask = {
    .name = "addition",
    .description = "\"47+85=\" wants \"132\"; size: digits of each number",
    .alphabet = "0123456789+=",
    .min_size = 1,
    .max_size = 18,  // the sum fits in int64
    .generate = generate,
    .check = check_answer,
};

}  // namespace cohort
