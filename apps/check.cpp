// `cohort check`: validates a configuration and its data, and prints what follows from them. Trains
// nothing.
#include <algorithm>
#include <cstdio>

#include "apps/commands.h"
#include "nn/memory.h"
#include "trainers/checkpoint.h"
#include "trainers/dataset.h"

namespace cohort::apps {
namespace {

std::string mib(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

void row(const char* name, const std::string& value) {
  std::printf("  %-28s %s\n", name, value.c_str());
}

// Longest prompt and longest prompt + solution of a sample of the training problems, in tokens.
struct Lengths {
  int64_t prompt = 0, sequence = 0;
  double mean_sequence = 0;
};
Lengths measure(const Dataset& data) {
  Lengths out;
  const int64_t n = std::min<int64_t>(data.train->size(), 1000);
  for (int64_t i = 0; i < n; ++i) {
    const Example e = data.train->get(i);
    const auto prompt = static_cast<int64_t>(data.tokenizer->encode(e.prompt).size());
    const auto sequence =
        prompt + static_cast<int64_t>(data.tokenizer->encode(e.solution).size()) + 1;
    out.prompt = std::max(out.prompt, prompt);
    out.sequence = std::max(out.sequence, sequence);
    out.mean_sequence += static_cast<double>(sequence) / static_cast<double>(n);
  }
  return out;
}

void check_stage(const TrainConfig& config) {
  parse_device(config.device);
  std::unique_ptr<Tokenizer> tokenizer;
  ModelConfig model = config.model;
  if (!config.init_from.empty()) {
    LoadedModel loaded = load_model(find_checkpoint(config.init_from), config.dtype);
    tokenizer = std::move(loaded.tokenizer);
    model = loaded.model->config();
  }
  const Dataset data = load_dataset(config, std::move(tokenizer));
  model.vocab_size = data.tokenizer->vocab_size();
  model.resolve();
  const ModelSize size = model_size(model);

  int64_t batch_tokens = 0, sequence = model.context;
  MemoryShape shape;
  if (config.trainer == TrainerType::kPretrain) {
    batch_tokens = config.batch_size * model.context;
  } else {
    const Lengths lengths = measure(data);
    if (std::max(lengths.sequence - 1, lengths.prompt + 1) > model.context)
      throw InputError(str("model.context: ", model.context, " tokens, but a training example has ",
                           lengths.sequence));
    if (config.trainer == TrainerType::kSft) {
      sequence = lengths.sequence;
      batch_tokens = static_cast<int64_t>(static_cast<double>(config.batch_size) *
                                          (lengths.mean_sequence - 1));
    } else {
      sequence = std::min(model.context, lengths.prompt + config.sampling.max_completion_length);
      batch_tokens = config.prompts_per_step * config.num_generations * (sequence - 1);
      shape.rollout_sequences = std::min(config.sampling.max_concurrent,
                                         config.prompts_per_step * config.num_generations);
      shape.rollout_length = sequence;
      shape.rollout_prefill_tokens =
          std::min<int64_t>(8192, shape.rollout_sequences * lengths.prompt);
    }
  }
  shape.micro_batch_tokens = std::min(config.micro_batch_tokens, batch_tokens);
  if (config.trainer == TrainerType::kGrpo && config.grpo.beta > 0)
    shape.reference = MemoryShape::Reference::kHeld;
  const MemoryEstimate memory = estimate_memory(model, config.dtype, shape);

  std::printf("%s\n", trainer_name(config.trainer));
  row("parameters", std::to_string(size.parameters));
  row("vocabulary", std::to_string(model.vocab_size));
  row("heads",
      str(model.num_heads, " query, ", model.num_kv_heads, " key/value, of ", model.head_dim));
  row("MLP width", std::to_string(model.d_ff));
  row("longest sequence", str(sequence, " tokens"));
  if (config.trainer == TrainerType::kGrpo)
    row("completions per step", str(config.prompts_per_step, " prompts x ", config.num_generations,
                                    " = ", config.prompts_per_step * config.num_generations));
  row("tokens per step",
      str(config.trainer == TrainerType::kPretrain ? "" : "up to about ", batch_tokens));
  row("micro batches per step", std::to_string((batch_tokens + shape.micro_batch_tokens - 1) /
                                               std::max<int64_t>(1, shape.micro_batch_tokens)));
  row("optimiser updates",
      std::to_string(config.steps * (config.trainer == TrainerType::kGrpo
                                         ? config.grpo.num_iterations * config.grpo.num_minibatches
                                         : 1)));
  row("held-out", config.trainer == TrainerType::kPretrain
                      ? str(data.held_out_tokens.size(), " tokens")
                      : str(data.held_out.size(), " problems"));
  char flops[64];
  std::snprintf(flops, sizeof flops, "%.3g",
                train_flops_per_token(model, static_cast<double>(sequence)) *
                    static_cast<double>(batch_tokens));
  row("FLOP per step (training)", flops);
  row("memory: parameters", mib(memory.parameters));
  row("memory: gradients", mib(memory.gradients));
  row("memory: optimizer", mib(memory.optimizer));
  if (memory.reference > 0) row("memory: reference", mib(memory.reference));
  row("memory: activations", mib(memory.activations));
  row("memory: workspace", mib(memory.workspace));
  if (memory.rollout > 0) row("memory: rollouts", mib(memory.rollout));
  row("memory: peak per rank", mib(memory.peak()));
}

}  // namespace

int check(const CheckOptions& options) {
  const RunPlan plan = load_plan(options.config, options.overrides);
  for (const TrainConfig& stage : plan.stages) check_stage(stage);
  std::printf("%s: ok; a run would go to %s\n", options.config.c_str(), plan.output_dir.c_str());
  return kOk;
}

}  // namespace cohort::apps
