// Two tasks on strings of lowercase letters: "dbca>" reversed is "acbd", "dbca:" sorted is "abcd".
#include <algorithm>

#include "data/tasks/tasks.h"

namespace cohort {
namespace {

Example generate_reverse(Rng& rng, const TaskConfig& config) {
  const std::string letters = random_letters(rng, rng.between(config.min_size, config.max_size));
  const std::string reversed(letters.rbegin(), letters.rend());
  return {.prompt = letters + ">", .answer = reversed, .solution = reversed};
}

Example generate_sort(Rng& rng, const TaskConfig& config) {
  const std::string letters = random_letters(rng, rng.between(config.min_size, config.max_size));
  std::string sorted = letters;
  std::sort(sorted.begin(), sorted.end());
  return {.prompt = letters + ":", .answer = sorted, .solution = sorted};
}

}  // namespace

const Task kReverseTask = {
    .name = "reverse",
    .description = "\"dbca>\" wants \"acbd\"; size: letters",
    .alphabet = "abcdefghijklmnopqrstuvwxyz>",
    .min_size = 1,
    .max_size = 256,
    .generate = generate_reverse,
    .check = check_answer,
};

const Task kSortTask = {
    .name = "sort",
    .description = "\"dbca:\" wants \"abcd\"; size: letters",
    .alphabet = "abcdefghijklmnopqrstuvwxyz:",
    .min_size = 1,
    .max_size = 256,
    .generate = generate_sort,
    .check = check_answer,
};

}  // namespace cohort
