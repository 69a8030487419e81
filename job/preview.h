// Checks and estimates a plan without training it.
#pragma once

#include <algorithm>
#include <vector>

#include "core/sizes.h"
#include "data/data_check.h"
#include "job/config.h"
#include "nn/memory.h"

namespace cohort {

struct StagePreview {
  ModelConfig model;          // resolved, with its vocabulary
  DataLengths lengths;        // training data
  int64_t held_out = 0;       // problems, or tokens of text
  int64_t held_out_size = 0;  // problems there are before eval.size
  // The first training problems (sft, grpo).
  std::vector<Example> examples;
  // (grpo, and where a program is eval.correct.reward) Rewards of the solution of each: "task 1,
  // format 1; total 1.1".
  std::vector<std::string> gold_rewards;
  // (likewise) Warning if solutions get less than the maximum reward, with their number, the first
  // one, the first error of a program and a hint; empty: none.
  std::string reward_warning;
  // (sft) Warning if most examples teach no stop token, with a hint; empty: none.
  std::string stop_warning;
  std::string leak;  // held_out_leak()
  // Says that sft or grpo starts from random weights, a warning unless a new model is meant, which
  // the configuration describes; empty: it does not.
  std::string random_start;
  bool is_new_model_meant = false;
};

// Throws InputError if the first stage trains adapters (lora) of a new model, which only a plan for
// a GPU may do.
void check_adapters_have_model(const RunPlan& plan);

// Upper bounds for the size of a step.
struct StepSize {
  int64_t tokens = 0;            // over all ranks
  int64_t longest_sequence = 0;  // inputs of the model
  MemoryShape memory;            // per rank
  int64_t micro_batches() const {
    return ceil_div(tokens, std::max<int64_t>(1, memory.micro_batch_tokens));
  }
};
StepSize step_size(const TrainConfig& config, const StagePreview& stage, int64_t ranks);

// Chooses a value for `micro_batch_tokens: auto` for `ranks` with `available` bytes each, and for
// model.recompute: the least recomputation, from the configured one on, with which 8,192 tokens (or
// all of a rank's) fit, then as many tokens as fit, up to 32,768, but at least a sequence. Returns
// the choice and its reason, human-readable; "" if micro_batch_tokens is a number.
std::string choose_micro_batch(TrainConfig& config, const StagePreview& stage, int64_t ranks,
                               int64_t available);

// Bytes that are free for each rank.
struct FreeMemory {
  int64_t device = 0, host = 0;
};
// Chooses for `optimizer.place: auto`: the device if all fits there without recomputing whole
// blocks that need not be; else the memory of the host, if that makes it fit, for as few units of
// the model as leave room for the micro batches and the whole cache of a rollout. Returns the
// choice and its reason if it is the host; "" otherwise. To be called before choose_micro_batch().
std::string choose_place(TrainConfig& config, const StagePreview& stage, int64_t ranks,
                         const FreeMemory& free);

// Seconds that an update waits for optimizer state of `bytes` in the host's memory to pass through
// the device and back, over PCIe 5.0 x16 (bench/results/h200.md).
inline double streaming_seconds(int64_t bytes) {
  return static_cast<double>(bytes) / 41.6e9;
}
// Number of units of a model's ParameterSet: the tables, each block, the end.
inline int64_t num_units(const ModelConfig& model) {
  return model.num_layers + 2;
}
// Optimiser updates of a step.
int64_t updates_per_step(const TrainConfig& config);
// Says that streaming takes more than half as long as the rest of an update, with a hint; "" if it
// does not.
std::string slow_streaming(double streaming_seconds, double other_seconds);

// Counts the held-out problems of `data` that are trained on, by its stage or by an earlier one,
// and names the first of them; empty: none. Problems are identified by their ExampleId. Earlier
// stages whose files no longer exist are skipped.
std::string held_out_leak(const Dataset& data, std::span<const TrainConfig> earlier);

// Loads the inputs of every stage and checks that they fit together: data, the initial model,
// rewards; each stage against the model and tokenizer of the one before. Throws InputError for
// errors that would otherwise stop the run at the start of a stage, and with the last lines that it
// printed for a program of a reward or an environment that fails for every printed example. The
// devices need not exist.
std::vector<StagePreview> preview_plan(const RunPlan& plan);

}  // namespace cohort
