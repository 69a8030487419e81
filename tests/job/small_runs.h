// Training small_configs.h in this process.
#pragma once

#include <string>
#include <vector>

#include "job/run.h"
#include "tests/job/small_configs.h"

namespace cohort::test {

// A plan from YAML text, written to DIR/NAME.yaml, that trains in DIR/NAME.
RunPlan small_plan(const TempDir& dir, const std::string& name, const std::string& yaml,
                   const std::vector<std::string>& overrides = {});

// Records the reports of a run.
class Recorder final : public Reporter {
 public:
  void step(int64_t step, const Metrics& metrics) override;
  void message(const std::string& text) override { messages.push_back(text); }
  void completion(const std::string&) override { ++completions; }
  std::vector<std::string> messages;
  size_t completions = 0;
  std::vector<int64_t> steps;
  // Called after each step, on the thread of rank 0.
  std::function<void(int64_t)> on_step;
};

// Trains the plan to its end in a new run directory, which is returned.
std::string train_new(const RunPlan& plan);
// Trains until `steps` steps of the last stage are done, as if interrupted then. Returns the run
// directory.
std::string train_interrupted(const RunPlan& plan, int64_t steps);
// Resumes a run and trains it to its end.
void train_rest(const std::string& run_dir, const std::vector<std::string>& overrides = {});
}  // namespace cohort::test
