// The table of generated tasks, and sets of their problems. A new task is one file in data/tasks/
// and one line here.
#include <algorithm>
#include <limits>
#include <unordered_set>

#include "data/example.h"
#include "data/split.h"
#include "data/tasks/tasks.h"

namespace cohort {
namespace {

const Task* const kTasks[] = {
    &kAdditionTask, &kArithmeticTask, &kCountdownTask, &kParityTask, &kReverseTask, &kSortTask,
};

// The purpose of rng_stream() for generated problems.
constexpr uint64_t kTaskPurpose = 5;
constexpr double kHeldOutFraction = 0.1;
// Attempts to generate a training problem before an error: all fail with probability 0.1^200.
constexpr int kMaxTries = 200;
// Consecutive attempts without a new held-out problem before an error.
constexpr int kMaxFailures = 100000;

std::string sizes_text(const TaskConfig& config) {
  return str("sizes ", config.min_size, " to ", config.max_size);
}

void check_sizes(const Task& task, const TaskConfig& config) {
  if (config.min_size < task.min_size || config.max_size > task.max_size ||
      config.min_size > config.max_size)
    throw InputError(str("task ", task.name, ": ", sizes_text(config),
                         " are not possible; hint: choose min_size <= max_size from ",
                         task.min_size, " to ", task.max_size, " (", task.description, ")"));
}

class TrainingProblems final : public ExampleSet {
 public:
  TrainingProblems(const Task& task, const TaskConfig& config, uint64_t seed)
      : task_(task), config_(config), seed_(seed) {}

  int64_t size() const override { return std::numeric_limits<int64_t>::max(); }
  Example get(int64_t index) const override {
    COHORT_CHECK(index >= 0, "[task] expected an index from 0, got ", index);
    Rng rng(seed_, rng_stream(kTaskPurpose, static_cast<uint64_t>(index)));
    for (int i = 0; i < kMaxTries; ++i) {
      Example example = task_.generate(rng, config_);
      if (!is_held_out(split_hash(example.key()), kHeldOutFraction)) return example;
    }
    throw InputError(str("task ", task_.name, ": every problem of ", sizes_text(config_),
                         " is held out; hint: raise max_size, so that there are more problems"));
  }

 private:
  const Task& task_;
  TaskConfig config_;
  uint64_t seed_;
};

std::vector<Example> held_out_problems(const Task& task, const TaskConfig& config, uint64_t seed,
                                       int64_t size) {
  // Third word 1 separates this stream from those of training problems.
  Rng rng(seed, rng_stream(kTaskPurpose, 0, 1));
  std::vector<Example> examples;
  std::unordered_set<std::string> seen;
  for (int failures = 0; static_cast<int64_t>(examples.size()) < size; ++failures) {
    if (failures == kMaxFailures)
      throw InputError(str("task ", task.name, ": asked for ", size, " held-out problems of ",
                           sizes_text(config), ", but only ", examples.size(),
                           " could be found; hint: ask for fewer, or raise max_size"));
    Example example = task.generate(rng, config);
    if (!is_held_out(split_hash(example.key()), kHeldOutFraction)) continue;
    if (!seen.insert(example.prompt).second) continue;
    examples.push_back(std::move(example));
    failures = 0;
  }
  return examples;
}

}  // namespace

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r\n";
  text.remove_prefix(std::min(text.find_first_not_of(kBlank), text.size()));
  return text.substr(0, text.find_last_not_of(kBlank) + 1);
}

double check_answer(const Example& example, std::string_view completion) {
  return trimmed(completion) == example.answer ? 1 : 0;
}

std::string random_letters(Rng& rng, int64_t size) {
  std::string letters(static_cast<size_t>(size), 'a');
  for (char& c : letters) c = static_cast<char>('a' + rng.below(26));
  return letters;
}

std::vector<const Task*> tasks() {
  return {std::begin(kTasks), std::end(kTasks)};
}

const Task& find_task(const std::string& name) {
  std::string known;
  for (const Task* task : kTasks) {
    if (name == task->name) return *task;
    known += str(known.empty() ? "" : ", ", task->name);
  }
  throw InputError(str("unknown task '", name, "'; known: ", known));
}

std::unique_ptr<ExampleSet> make_task_set(const Task& task, const TaskConfig& config, Split split,
                                          uint64_t seed, int64_t size) {
  check_sizes(task, config);
  if (split == Split::kHeldOut) {
    COHORT_CHECK(size > 0, "[task] expected a positive number of held-out problems, got ", size);
    return make_example_set(held_out_problems(task, config, seed, size));
  }
  auto problems = std::make_unique<TrainingProblems>(task, config, seed);
  problems->get(0);  // reports too few problems now, not in the middle of a run
  return problems;
}

}  // namespace cohort
