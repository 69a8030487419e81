// Runs small enough to be repeated many times: one layer, a task with few characters, a few steps.
#pragma once

#include <string>
#include <vector>

#include "data/json.h"
#include "tests/support/test_util.h"
#include "trainers/run.h"

namespace cohort::test {

// Keys that all small configurations share.
inline constexpr const char* kSmallModel =
    "model: {num_layers: 1, d_model: 16, num_heads: 2, context: 16, init_std: 0.1}\n"
    "num_threads: 1\n"
    "learning_rate: 1e-2\n"
    "eval: {size: 8}\n"
    "max_completion_length: 4\n";
inline constexpr const char* kSmallData = "data: {task: addition, task_sizes: {max_size: 2}}\n";
inline constexpr const char* kSmallSft = "trainer: sft\nsteps: 6\nbatch_size: 8\nwarmup_steps: 2\n";
// Rewards that most groups disagree about from the first step on.
inline constexpr const char* kSmallGrpo =
    "trainer: grpo\nsteps: 4\nprompts_per_step: 4\nnum_generations: 6\n"
    "lr_schedule: constant\n"
    "rewards:\n  - {name: format, pattern: '.*1.*'}\n  - {name: task}\n";
inline constexpr const char* kSmallPretrain =
    "trainer: pretrain\nsteps: 6\nbatch_size: 4\nwarmup_steps: 2\n"
    "data: {text: text.txt, held_out_fraction: 0.2}\n";

// A text for kSmallPretrain.
std::string small_text();

// A plan from YAML text, written to DIR/NAME.yaml, that trains in DIR/NAME.
RunPlan small_plan(const TempDir& dir, const std::string& name, const std::string& yaml,
                   const std::vector<std::string>& overrides = {});

// Remembers what a run reports.
class Recorder final : public Reporter {
 public:
  void step(int64_t step, const Metrics& metrics) override;
  void message(const std::string& text) override { messages.push_back(text); }
  std::vector<std::string> messages;
  std::vector<int64_t> steps;
  // Called after each step, on the thread of rank 0.
  std::function<void(int64_t)> on_step;
};

// Trains the plan to its end in a new run directory, which is returned.
std::string train_new(const RunPlan& plan);
// Trains until `steps` steps of the last stage are done, as if interrupted then. Returns the run
// directory.
std::string train_interrupted(const RunPlan& plan, int64_t steps);
// Takes up a run and trains it to its end.
void train_rest(const std::string& run_dir, const std::vector<std::string>& overrides = {});

// The bytes of a file of the newest checkpoint of a run.
std::string checkpoint_bytes(const std::string& run_dir,
                             const std::string& file = "model.safetensors");
// All weights of the newest checkpoint, one after the other.
Tensor final_weights(const std::string& run_dir);
// The lines of a JSONL file.
std::vector<Json> json_lines(const std::string& path);
// One number of a line of metrics.jsonl.
double metric(const Json& line, const std::string& name);

}  // namespace cohort::test
