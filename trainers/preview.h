// What a plan comes to, found out without training it.
#pragma once

#include <vector>

#include "nn/memory.h"
#include "trainers/data_check.h"

namespace cohort {

struct StagePreview {
  ModelConfig model;          // resolved, with its vocabulary
  DataLengths lengths;        // of the training data
  int64_t held_out = 0;       // problems, or tokens of text
  int64_t held_out_size = 0;  // problems there are before eval.size
  // The first training problems (sft, grpo).
  std::vector<Example> examples;
  // (grpo) What the rewards give the solution of each: "task 1, format 1; total 1.1".
  std::vector<std::string> gold_rewards;
  // (grpo) How many solutions get less than the rewards can give, the first, and a next step;
  // empty: none.
  std::string doubt;
  std::string leak;  // held_out_leak()
};

// The size of a step, at most.
struct StepSize {
  int64_t tokens = 0;            // over all ranks
  int64_t longest_sequence = 0;  // inputs of the model
  MemoryShape memory;            // of one rank
  int64_t micro_batches() const;
};
StepSize step_size(const TrainConfig& config, const StagePreview& stage, int64_t ranks);

// Gives `micro_batch_tokens: auto` a value for `ranks` that have `available` bytes each, and
// model.recompute too: the least of it, from the configured one on, with which 8,192 tokens (or all
// of a rank's) fit, then as many tokens as fit, up to 32,768. Without room for a single sequence it
// is one sequence all the same. Returns what was chosen, and why, for people; "" where nothing was
// to be chosen.
std::string choose_micro_batch(TrainConfig& config, const StagePreview& stage, int64_t ranks,
                               int64_t available);

// Loads what every stage needs and checks that it fits together: data, the model a run starts from,
// rewards; each stage against the model and tokenizer of the one before. Throws InputError for what
// would otherwise stop the run at the start of a stage. The devices need not be there.
std::vector<StagePreview> preview_plan(const RunPlan& plan);

}  // namespace cohort
