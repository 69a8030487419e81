#include "tests/job/small_runs.h"

namespace cohort::test {

RunPlan small_plan(const TempDir& dir, const std::string& name, const std::string& yaml,
                   const std::vector<std::string>& overrides) {
  const std::string path = dir.path(name + ".yaml");
  write_file(dir.path("text.txt"), small_text());
  write_file(dir.path("pairs.jsonl"), small_pairs());
  write_file(path, yaml + "\noutput_dir: " + dir.path(name) + "\n");
  return load_plan(path, overrides);
}

void Recorder::step(int64_t step, const Metrics&) {
  steps.push_back(step);
  if (on_step) on_step(step);
}

std::string train_new(const RunPlan& plan) {
  Recorder recorder;
  const std::atomic<bool> stop{false};
  Run run = Run::create(plan);
  EXPECT_EQ(run.execute(recorder, stop).end, StageEnd::kFinished);
  return run.dir();
}

std::string train_interrupted(const RunPlan& plan, int64_t steps) {
  Recorder recorder;
  std::atomic<bool> stop{false};
  recorder.on_step = [&](int64_t step) { stop = step >= steps; };
  Run run = Run::create(plan);
  EXPECT_EQ(run.execute(recorder, stop).end, StageEnd::kInterrupted);
  return run.dir();
}

void train_rest(const std::string& run_dir, const std::vector<std::string>& overrides) {
  Recorder recorder;
  const std::atomic<bool> stop{false};
  EXPECT_EQ(Run::resume(run_dir, overrides).execute(recorder, stop).end, StageEnd::kFinished);
}

}  // namespace cohort::test
