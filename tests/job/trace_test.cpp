// Traces of runs: cohort train --profile N.
#include <algorithm>
#include <map>

#include "tests/job/small_runs.h"

namespace cohort::test {
namespace {

TEST(TraceOfARun, HasTheRequestedSteps) {
  const TempDir dir;
  const struct {
    const char *name, *yaml;
    int64_t steps;
    std::vector<std::string> names;  // expected phases and ops
  } cases[] = {
      {"sft", kSmallSft, 2, {"forward", "backward", "optimizer", "linear_forward", "adamw_step"}},
      {"grpo", kSmallGrpo, 3, {"sampling", "rewards", "packing", "update", "attention_backward"}},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.name);
    cohort::Run run =
        cohort::Run::create(small_plan(dir, c.name, kSmallCommon + c.yaml, {"ranks=2"}));
    Recorder recorder;
    const std::atomic<bool> stop = false;
    run.execute(recorder, stop, c.steps);
    const std::string path = run.dir() + "/trace.json";
    const Json trace = parse_json(read_file(path), path);
    std::map<std::string, int64_t> counts;
    for (const Json& event : trace.at("traceEvents").as_array()) {
      if (event.at("ph").as_string() != "X") continue;
      ++counts[event.at("name").as_string()];
      EXPECT_GE(event.at("ts").as_double(), 0);
      EXPECT_GE(event.at("dur").as_double(), 0);
    }
    EXPECT_EQ(counts["step"], c.steps);
    for (const std::string& name : c.names) EXPECT_GE(counts[name], c.steps) << name;
    const auto report = std::find_if(
        recorder.messages.begin(), recorder.messages.end(),
        [](const std::string& message) { return message.find("trace of steps") == 0; });
    ASSERT_NE(report, recorder.messages.end());
    // The last steps, where there are fewer than two before them.
    EXPECT_NE(report->find(c.steps == 2 ? "steps 3 to 4: " : "steps 2 to 4: "), std::string::npos)
        << *report;
    EXPECT_NE(report->find(path), std::string::npos) << *report;
  }
}

TEST(TraceOfARun, ThatEndsEarlyHasTheStepsDone) {
  const TempDir dir;
  cohort::Run run = cohort::Run::create(small_plan(dir, "run", kSmallCommon + kSmallSft, {}));
  Recorder recorder;
  std::atomic<bool> stop = false;
  recorder.on_step = [&](int64_t step) { stop = step == 3; };
  EXPECT_EQ(run.execute(recorder, stop, 4).end, StageEnd::kInterrupted);
  const Json trace = parse_json(read_file(run.dir() + "/trace.json"), "trace.json");
  int64_t steps = 0;
  for (const Json& event : trace.at("traceEvents").as_array())
    steps += event.at("name").as_string() == "step";
  EXPECT_EQ(steps, 1);
}

}  // namespace
}  // namespace cohort::test
