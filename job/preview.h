// Checks and estimates a plan without training it.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "data/data_check.h"
#include "job/config.h"
#include "nn/transformer.h"

namespace cohort {

// The keys of the model with the head that the trainer trains, whose labels are read from the data.
// Throws InputError where class_labels() does.
ModelConfig model_with_head(const TrainConfig& config);

// kWholeModel if the context of a stage's model is the largest that a trained model has.
ContextLimit context_limit(const TrainConfig& config, const ModelConfig& model);

// The configuration of the model in the folder `reference` of a stage. Throws InputError where its
// tokens are not those of `tokenizer`, or its head or context is smaller than that of `student`.
ModelConfig check_teacher(const TrainConfig& config, const ModelConfig& student,
                          const Tokenizer& tokenizer);

// The prompt that the reference of a stage reads for a problem, by reference_prompt. It throws
// InputError naming the problem where the prompt is empty or, with the longest completion that the
// policy may write after its own prompt, longer than the reference's context. `data` must outlive
// it.
std::function<std::vector<int32_t>(const Example&)> reference_prompt(const TrainConfig& config,
                                                                     const Dataset& data,
                                                                     int64_t context,
                                                                     int64_t reference_context);

// Warning if the learning rate is more than ten times the default, and the model a trained one of
// at least 50M parameters (small ones learn at higher rates); empty: none.
std::string rate_warning(const TrainConfig& config, const ModelConfig& model);

struct StagePreview {
  ModelConfig model;                   // resolved, with its vocabulary
  std::optional<ModelConfig> teacher;  // (grpo) that of the folder `reference`; nullopt: none
  DataLengths lengths;                 // training data
  int64_t held_out = 0;                // problems, or tokens of text
  int64_t held_out_size = 0;           // problems there are before eval.size
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
  // Warning if the chat template does not show the tools, or the calls of a message; empty: none.
  std::string template_warning;
  std::string rate_warning;
  std::string leak;  // held_out_leak()
  // Says that sft or grpo starts from random weights, a warning unless a new model is meant, which
  // the configuration describes; empty: it does not.
  std::string random_start;
  bool is_new_model_meant = false;
};

// Throws InputError if the first stage trains adapters (lora) of a new model, which only a plan for
// a GPU may do.
void check_adapters_have_model(const RunPlan& plan);

// Loads the inputs of every stage and checks that they fit together: data, the initial model,
// rewards; each stage against the model and tokenizer of the one before. Throws InputError for
// errors that would otherwise stop the run at the start of a stage, and with the last lines that it
// printed for a program of a reward or an environment that fails for every printed example. The
// devices need not exist.
std::vector<StagePreview> preview_plan(const RunPlan& plan);

// Sets data.held_out_fraction, where it is not given, to 0 if all stages with problems to split
// have fewer than 50, of which a tenth measures nothing, and none needs an evaluation.
void hold_nothing_out_of_few(RunPlan& plan);

}  // namespace cohort
