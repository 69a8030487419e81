// Parity with worked steps: "10110=" wants "11011:1", the parity of each prefix, then a colon and
// the parity of all bits. Only the text after the last colon is graded, not the steps. A solution
// without steps is ":1", which a small model can only guess: with a worked_share below 1,
// supervised training teaches both styles and reinforcement learning has to discover which one is
// rewarded (the setting of Tsilivis et al. 2025).
#include "data/tasks/tasks.h"

namespace cohort {
namespace {

Example generate(Rng& rng, const TaskConfig& config) {
  const int64_t size = rng.between(config.min_size, config.max_size);
  std::string bits, steps;
  int64_t parity = 0;
  for (int64_t i = 0; i < size; ++i) {
    const int64_t bit = rng.below(2);
    parity ^= bit;
    bits += static_cast<char>('0' + bit);
    steps += static_cast<char>('0' + parity);
  }
  const std::string answer = std::to_string(parity);
  if (rng.uniform() >= config.worked_share) steps.clear();
  return {.prompt = bits + "=", .answer = answer, .solution = steps + ":" + answer};
}

double check(const Example& example, std::string_view completion) {
  const size_t colon = completion.rfind(':');
  return colon == completion.npos ? 0 : check_answer(example, completion.substr(colon + 1));
}

}  // namespace

const Task kParityTask = {
    .name = "parity",
    .description =
        "\"10110=\" wants \"11011:1\", prefix parities then the answer (\":1\" without steps); "
        "size: bits",
    .alphabet = "01=:",
    .min_size = 1,
    .max_size = 256,
    .generate = generate,
    .check = check,
};

}  // namespace cohort
