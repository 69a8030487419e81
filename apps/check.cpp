// `cohort check`: validates a configuration and its data, and prints derived sizes. Trains nothing.
#include <algorithm>
#include <cstdio>

#include "apps/commands.h"
#include "core/log.h"
#include "core/sizes.h"
#include "data/tasks/tasks.h"
#include "runs/resources.h"
#include "runs/run_directory.h"
#include "text/utf8.h"

namespace cohort::apps {
namespace {

void print_sizes(const TrainConfig& config, const StagePreview& stage, const StepSize& size) {
  const bool text = config.batch.trainer == TrainerType::kPretrain,
             grpo = config.batch.trainer == TrainerType::kGrpo;
  const ModelConfig& model = stage.model;
  std::printf("%s\n", trainer_name(config.batch.trainer));
  print_row("parameters", std::to_string(model_size(model).parameters));
  print_row("vocabulary", std::to_string(model.vocab_size));
  print_row("heads", str(model.num_heads, " query, ", model.num_kv_heads, " key/value, of ",
                         model.head_dim));
  print_row("MLP width", std::to_string(model.d_ff));
  print_row("longest sequence", str(size.longest_sequence, " tokens"));
  if (grpo)
    print_row("completions per step",
              str(config.batch.prompts_per_step, " prompts x ", config.batch.num_generations, " = ",
                  config.batch.completions_per_step()));
  print_row("tokens per step", str(text ? "" : "up to about ", size.tokens));
  print_row("micro batches per step", std::to_string(size.micro_batches()));
  print_row("optimiser updates",
            std::to_string(config.batch.steps *
                           (grpo ? config.grpo.num_iterations * config.grpo.num_minibatches : 1)));
  const std::string total =
      stage.held_out < stage.held_out_size ? str(" of ", stage.held_out_size) : "";
  print_row("held-out", str(stage.held_out, total, text ? " tokens" : " problems"));
  if (!stage.lengths.too_long.empty()) print_row("data.too_long", stage.lengths.too_long);
  for (const std::string& note : stage.lengths.notes) print_row("note", note);
  if (const int64_t capacity = model.context - stage.lengths.longest_prompt;
      grpo && capacity < config.sampling.max_completion_length)
    print_row("completion capacity", str(capacity, " of ", config.sampling.max_completion_length,
                                         " tokens after the longest prompt"));
  char flops[64];
  std::snprintf(flops, sizeof flops, "%.3g",
                train_flops_per_token(model, static_cast<double>(size.longest_sequence)) *
                    static_cast<double>(size.tokens));
  print_row("FLOP per step (training)", flops);
}

// The configuration with the micro batches that a run would choose on this machine. `chosen`
// describes the choice.
TrainConfig with_micro_batch(const TrainConfig& config, StagePreview& stage, int64_t ranks,
                             std::string& chosen) {
  TrainConfig out = config;
  const Device device = device_named(config.device, "device");
  if (config.batch.micro_batch_tokens) return out;
  if (device.is_cuda() && device.index >= cuda_device_count()) {
    chosen = str("chosen by the memory of the training machine; here ", out.batch.micro_batch(),
                 " tokens");
    return out;
  }
  chosen = choose_micro_batch(out, stage, ranks, free_memory(device) / config.ranks);
  stage.model.recompute = out.model.recompute;
  return out;
}

// An excerpt of a prompt on one line. For a long one it includes the question, which may follow a
// system message and earlier turns.
std::string prompt_excerpt(const Example& example) {
  constexpr size_t kHead = 200, kTail = 400, kTemplate = 60;
  const std::string& prompt = example.prompt;
  const size_t question =
      example.question.empty() ? prompt.npos : prompt.rfind(trimmed(example.question));
  if (question == prompt.npos || prompt.size() <= kHead + kTail)
    return excerpt(prompt, kHead, kTail);
  const size_t before = next_utf8_boundary(prompt, kTemplate);
  if (before >= question) return excerpt(prompt, question + kTail, kHead);
  return excerpt(prompt.substr(0, before)) + " ... " +
         excerpt(prompt.substr(question), kTail, kHead);
}

void print_examples(const StagePreview& stage, bool full) {
  const auto quoted = [&](const std::string& text) {
    return full ? excerpt(text, text.size(), 0) : excerpt(text);
  };
  for (size_t i = 0; i < stage.examples.size(); ++i) {
    const Example& example = stage.examples[i];
    print_row(str("example ", i + 1, ": prompt"),
              full ? quoted(example.prompt) : prompt_excerpt(example));
    print_row("           answer", quoted(example.answer));
    if (example.solution != example.answer)
      print_row("           solution", quoted(example.solution));
    if (i < stage.gold_rewards.size()) print_row("           its rewards", stage.gold_rewards[i]);
  }
}

using Rows = std::vector<std::pair<std::string, std::string>>;

Rows memory_rows(const TrainConfig& config, const StagePreview& stage, const StepSize& size) {
  const MemoryEstimate memory = estimate_memory(stage.model, config.dtype, size.memory);
  Rows rows = {{"parameters", mib(memory.parameters)},
               {"gradients", mib(memory.gradients)},
               {"optimizer", mib(memory.optimizer)}};
  if (memory.reference > 0) rows.emplace_back("reference", mib(memory.reference));
  rows.emplace_back("activations", mib(memory.activations));
  rows.emplace_back("workspace", mib(memory.workspace));
  if (memory.rollout > 0) rows.emplace_back("rollouts", mib(memory.cache + memory.rollout));
  rows.emplace_back("peak per rank", mib(memory.peak()));
  return rows;
}

// The device of a stage, with a note if this machine lacks it.
std::string device_text(const TrainConfig& config, int64_t ranks) {
  std::string text = str(config.device, ranks > 1 ? str(", ", ranks, " ranks") : "");
  if (const Device device = device_named(config.device, "device");
      device.is_cuda() && device.index >= cuda_device_count())
    text += ", not on this machine, which has " + usable_cuda_devices();
  return text;
}

}  // namespace

std::string memory_plan(const RunPlan& plan, const std::vector<StagePreview>& stages,
                        int64_t processes) {
  std::string text;
  for (size_t i = 0; i < stages.size(); ++i) {
    const TrainConfig& config = plan.stages[i];
    const StepSize size = step_size(config, stages[i], std::max(config.ranks, processes));
    text += str("\nmemory plan of ", trainer_name(config.batch.trainer), ":");
    for (const auto& [name, value] : memory_rows(config, stages[i], size))
      text += str(" ", name, " ", value, ";");
  }
  return text;
}

int check(const CheckOptions& options) {
  RunPlan plan = load_plan(options.config, options.overrides);
  if (options.gpus > 0) expect_cuda(plan);
  std::vector<StagePreview> stages = preview_plan(plan);
  std::string memory_error;
  for (size_t i = 0; i < stages.size(); ++i) {
    const int64_t ranks = std::max<int64_t>(plan.stages[i].ranks, options.gpus);
    std::string chosen;
    const TrainConfig config = with_micro_batch(plan.stages[i], stages[i], ranks, chosen);
    if (memory_error.empty()) memory_error = memory_shortage(config, stages[i], ranks);
    const StepSize size = step_size(config, stages[i], ranks);
    print_sizes(config, stages[i], size);
    if (!chosen.empty()) print_row("micro_batch_tokens: auto", chosen);
    print_row("device", device_text(config, ranks));
    for (const auto& [name, value] : memory_rows(config, stages[i], size))
      print_row("memory: " + name, value);
    print_row("disk: checkpoint", mib(checkpoint_bytes(config, stages[i].model)));
    print_examples(stages[i], options.full);
    for (const std::string& warning : config.warnings()) logging::warn(warning);
    if (stages[i].is_new_model_meant)
      print_row("note", stages[i].random_start);
    else if (!stages[i].random_start.empty())
      logging::warn(stages[i].random_start);
    if (!stages[i].leak.empty()) logging::warn(stages[i].leak);
    if (!stages[i].reward_warning.empty()) logging::warn(stages[i].reward_warning);
  }
  plan.output_dir = next_run_directory(plan.output_dir);
  if (!memory_error.empty()) throw InputError(memory_error);
  const DiskNeed disk = disk_need(plan, stages);
  print_row("disk: checkpoints of the run",
            str(mib(disk.most), " at most",
                disk.free == INT64_MAX ? "" : str("; free: ", mib(disk.free))));
  if (!disk.shortage().empty()) logging::warn(disk.shortage());
  print(stdout, str(options.config, ": ok; a run would go to ", plan.output_dir, "\n"));
  return kOk;
}

}  // namespace cohort::apps
