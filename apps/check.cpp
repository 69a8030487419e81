// `cohort check`: validates a configuration and its data, and prints derived sizes. Trains nothing.
#include <algorithm>
#include <cstdio>

#include "apps/commands.h"
#include "config/node.h"
#include "core/log.h"
#include "core/sizes.h"
#include "data/image_set.h"
#include "data/tasks/tasks.h"
#include "job/forecast.h"
#include "job/memory_plan.h"
#include "job/resources.h"
#include "job/run_directory.h"
#include "sys/files.h"
#include "text/utf8.h"

namespace cohort::apps {
namespace {

void print_sizes(const TrainConfig& config, const StagePreview& stage, const StepSize& size) {
  const bool text = reads_text(config.batch.trainer),
             grpo = config.batch.trainer == TrainerType::kGrpo;
  const ModelConfig& model = stage.model;
  std::printf("%s\n", trainer_name(config.batch.trainer));
  const ModelSize count = model_size(model);
  print_row("parameters", std::to_string(count.parameters));
  if (count.adapters > 0)
    print_row("trained parameters",
              str(count.adapters, ", adapters of rank ", model.lora.rank, ", ",
                  score_text(100 * static_cast<double>(count.adapters) /
                                 static_cast<double>(count.parameters),
                             2),
                  " %"));
  print_row("vocabulary", std::to_string(model.vocab_size));
  print_row("heads", str(model.num_heads, " query, ", model.num_kv_heads, " key/value, of ",
                         model.head_dim));
  print_row("MLP width", std::to_string(model.d_ff));
  print_row(config.batch.trainer == TrainerType::kDpo ? "longest pair" : "longest sequence",
            str(size.longest_sequence, " tokens"));
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
                train_flops_per_token(model, static_cast<double>(size.longest_sequence),
                                      size.memory.targets) *
                    static_cast<double>(size.tokens));
  print_row("FLOP per step (training)", flops);
}

// The configuration with the micro batches that a run would choose on this machine. `chosen`
// describes the choice.
TrainConfig with_micro_batch(const TrainConfig& config, const StagePreview& stage, int64_t ranks,
                             std::string& chosen) {
  TrainConfig out = config;
  const Device device = device_named(config.device, "device");
  if (device.is_cuda() && device.index >= cuda_device_count()) {
    if (!config.batch.micro_batch_tokens)
      chosen = str("chosen by the memory of the training machine; here ", out.batch.micro_batch(),
                   " tokens");
    return out;
  }
  const int64_t nccl = device.is_cuda() ? nccl_bytes(ranks / config.ranks) : 0;
  const FreeMemory free{.device = (free_memory(device) - nccl) / config.ranks,
                        .host = free_memory(Device{}) / ranks};
  chosen = choose_by_memory(out, stage, ranks, free).micro_batch;
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
    for (const Example& rejected : example.rejected)
      print_row("           rejected", quoted(rejected.solution));
    // The last turn that is learned is the solution.
    for (size_t k = 0; k + 1 < example.loss_spans.size(); ++k) {
      const auto& [begin, end] = example.loss_spans[k];
      print_row("           learned too",
                quoted((example.prompt + example.solution).substr(begin, end - begin)));
    }
    if (i < stage.gold_rewards.size()) print_row("           its rewards", stage.gold_rewards[i]);
  }
}

// The overrides with the device and the dtype that --gpu implies: cuda, and bf16 unless a dtype is
// given. Adds those to `assumed`.
std::vector<std::string> gpu_overrides(const CheckOptions& options, std::string& assumed) {
  std::vector<std::string> out = options.overrides;
  const ConfigNode root = parse_yaml_file(options.config);
  bool has_dtype = root.find("dtype") != nullptr;
  if (const ConfigNode* stages = root.find("stages"))
    for (const ConfigNode& stage : stages->items)
      has_dtype = has_dtype || stage.find("dtype") != nullptr;
  for (const std::string& o : out) {
    const std::string key = o.substr(0, o.find('='));
    has_dtype = has_dtype || key == "dtype" || key.ends_with(".dtype");
  }
  out.emplace_back("device=cuda");
  assumed = "device: cuda";
  if (!has_dtype) {
    out.emplace_back("dtype=bf16");
    assumed += ", dtype: bf16";
  }
  return out;
}

// Prints what of the stage's optimizer state is on the host, if any is, and on `gpu` whether
// updates mostly wait for it.
void print_host_state(const TrainConfig& config, const StagePreview& stage, int64_t ranks,
                      const std::optional<GpuProperties>& gpu) {
  constexpr double kLockedPerSecond = 12.5e9;  // bytes, with 16 cores (bench/results/h200.md)
  const Device device = device_named(config.device, "device");
  const int64_t pinned =
      optimizer_bytes(config.optimizer, stage.model, config.dtype, device, ranks).pinned;
  if (pinned == 0 || !device.is_cuda()) return;
  const int64_t units = num_units(stage.model), on_host = config.optimizer.storage.host_units;
  print_row(
      "optimizer.place: host",
      str(on_host == 0 ? units : std::min(on_host, units), " of ", units, " units, ",
          mib(ranks * pinned), " of page-locked memory, locked in about ",
          score_text(static_cast<double>(ranks * pinned) / kLockedPerSecond, 1),
          " s, streamed in about ", score_text(streaming_seconds(pinned), 2), " s an update"));
  if (!gpu) return;
  const StepSize size = step_size(config, stage, ranks);
  const double flops =
      train_flops_per_token(stage.model, static_cast<double>(size.longest_sequence + 1) / 2,
                            size.memory.targets) *
      static_cast<double>(size.tokens) / static_cast<double>(ranks * updates_per_step(config));
  if (const std::string note = streaming_note(pinned, flops, *gpu); !note.empty())
    print_row("note", note);
}

// Decodes all images. Throws InputError with the number and the first of those that cannot be read.
void check_images(const ImagesConfig& config, int64_t channels) {
  for (const std::string& path : {config.path, config.eval_path}) {
    if (path.empty()) continue;
    const ImageSet images(path, config.field, config.label);
    const std::vector<std::string> bad = images.check_all(channels);
    if (!bad.empty())
      throw InputError(str(bad.size(), " of the ", images.size(), " images of ", path,
                           " cannot be read; the first: ", bad[0]));
  }
}

// Prints whether the stage runs on the GPU, and whether `model`, its model as configured, can be
// sampled from there. Returns the error if the stage does not run.
std::string print_gpu_plan(const GpuPlan& plan, const StagePreview& stage, const ModelConfig& model,
                           int64_t ranks, const GpuProperties& gpu) {
  const TrainConfig& config = plan.config;
  const int64_t length = step_size(config, stage, ranks).longest_sequence + 1;
  const std::string settings = str(
                        "micro_batch_tokens: ", config.batch.micro_batch(), ", model.recompute: ",
                        kRecomputeNames[static_cast<size_t>(config.model.recompute)].name,
                        ", moments: ",
                        config.optimizer.storage.moments == MomentKind::kBF16 ? "bf16" : "f32",
                        config.optimizer.storage.place == StatePlace::kHost ? ", place: host" : "",
                        is_sharded(config.optimizer.sharding)
                            ? str(", sharding: ",
                                  entry_of(kShardingNames, config.optimizer.sharding).name)
                            : ""),
                    need = str(mib(plan.memory.peak()), " of ", mib(plan.usable));
  print_row("memory: host", str(mib(host_memory(config, stage.model, ranks)), " at a checkpoint"));
  const std::string title = "runs on " + gpu.name;
  std::string error;
  if (plan.runs) {
    print_row(title, str("yes: ", settings, "; ", need));
  } else if (!plan.changes.empty()) {
    print_row(title, str("not as configured; with ", plan.changes, ": ", need));
    error = str("memory: ", trainer_name(config.batch.trainer), " needs ", mib(plan.given),
                " as configured, and ", gpu.name, " has ", mib(plan.usable),
                " for it; hint: ", plan.changes);
  } else {
    print_row(title, "no");
    error = "memory: " + plan.shortage;
  }
  const InferencePlan inference = plan_inference(model, length, gpu);
  print_row(
      "inference on " + gpu.name,
      inference.cache_tokens == 0
          ? str("no: the weights take ", mib(inference.weights))
          : str("yes: weights ", mib(inference.weights), ", a cache of ", inference.cache_tokens,
                " tokens, ", inference.sequences, " sequences of ", length,
                inference.state > 0 ? str(" with states of ", mib(inference.state)) : ""));
  return error;
}

// The device of a stage, with a note if this machine lacks it.
std::string device_text(const TrainConfig& config, int64_t ranks) {
  std::string text = str(config.device, ranks > 1 ? str(", ", ranks, " ranks") : "");
  if (const Device device = device_named(config.device, "device");
      device.is_cuda() && device.index >= cuda_device_count())
    text += ", not on this machine, which has " + usable_cuda_devices();
  return text;
}

// "2 GPUs, each as rtx4090 (sm_89, 24064.0 MiB)".
std::string gpu_text(const GpuProperties& gpu, int64_t gpus) {
  return str(gpus > 1 ? str(gpus, " GPUs, each as ") : "", gpu.name, " (sm_",
             gpu.compute_capability, ", ", mib(gpu.memory), ")");
}

// Sizes of a model that cost speed on a GPU; the factors are measured (bench/results/h200.md).
void note_sizes(const ModelConfig& model) {
  constexpr int64_t kVocabularyUnit = 64;
  if (const int64_t rows = round_up(model.vocab_size, kVocabularyUnit); rows != model.vocab_size)
    print_row("note", str("vocabulary: rows are padded to ", rows,
                          " in memory; a step takes 1.00 times as long as with that size"));
  for (const std::string& warning : slow_sizes(model)) logging::warn(warning);
}

void print_notes(const TrainConfig& config, const StagePreview& stage) {
  for (const std::string& warning : config.warnings()) logging::warn(warning);
  if (stage.is_new_model_meant) print_row("note", stage.random_start);
  for (const std::string& warning :
       {stage.is_new_model_meant ? "" : stage.random_start, stage.leak, stage.stop_warning,
        stage.template_warning, stage.rate_warning, stage.reward_warning})
    if (!warning.empty()) logging::warn(warning);
  if (device_named(config.device, "device").is_cuda()) note_sizes(stage.model);
}

// Prints what ranks send in an update, and for GPUs of known speed how long a step takes.
void print_forecast(const TrainConfig& config, const StagePreview& stage,
                    const MemoryEstimate& memory, const Cluster& cluster) {
  if (cluster.ranks > 1 && config.optimizer.sharding != Sharding::kAuto) {
    const UpdateTraffic traffic = update_traffic(config, stage, cluster.ranks, cluster.hosts);
    print_row("sent in an update",
              str("gradients ", mib(traffic.gradients), ", weights ", mib(traffic.weights),
                  " by each rank",
                  cluster.hosts > 1 ? str("; of the gradients ", score_text(100 * traffic.far, 1),
                                          " % to other hosts")
                                    : ""));
  }
  const std::optional<StepForecast> f = forecast_step(config, stage, memory, cluster);
  if (!f) return;
  const auto text = [](double seconds) { return score_text(seconds, 3); };
  print_row("forecast: step",
            str(text(f->step()), " s: rollout ", text(f->rollout), ", forward and backward ",
                text(f->update), ", optimizer ", text(f->optimizer), ", communication ",
                text(f->communication), "; balance ", score_text(f->balance, 2)));
  print_row("forecast: run", str(score_text(f->tokens, 0), " tokens/s, ", score_text(f->scaling, 2),
                                 " times one GPU's with enough memory; ", score_text(f->days, 2),
                                 " days without rewards and evaluations, ", score_text(f->save, 1),
                                 " s a checkpoint"));
}

// Prints a stage, planned for `gpu` or else for this machine. Returns the error of one that needs
// more memory than there is.
std::string check_stage(const TrainConfig& given, StagePreview& stage, const CheckOptions& options,
                        const std::optional<GpuProperties>& gpu) {
  const int64_t ranks = std::max<int64_t>(given.ranks, options.gpus);
  std::string chosen, error;
  std::optional<GpuPlan> planned;
  if (gpu)
    stage.model.check_gpu(gpu->compute_capability, given.dtype);
  else
    stage.model.check_gpu(device_named(given.device, "device"), given.dtype);
  if (gpu) planned = plan_for_gpu(given, stage, ranks, *gpu);
  const TrainConfig config = gpu ? planned->config : with_micro_batch(given, stage, ranks, chosen);
  const ModelConfig model = stage.model;
  stage.model.recompute = config.model.recompute;
  stage.model.lora = config.model.lora;
  if (!gpu) error = memory_shortage(config, stage, ranks);
  const StepSize size = step_size(config, stage, ranks);
  print_sizes(config, stage, size);
  if (!chosen.empty()) print_row("micro_batch_tokens: auto", chosen);
  print_row("device", gpu ? gpu_text(*gpu, options.gpus) : device_text(config, ranks));
  for (const auto& [name, value] :
       memory_rows(gpu ? planned->memory : memory_of(config, stage, ranks)))
    print_row("memory: " + name, value);
  print_host_state(config, stage, ranks, gpu);
  if (gpu) error = print_gpu_plan(*planned, stage, model, ranks, *gpu);
  print_forecast(
      config, stage, gpu ? planned->memory : MemoryEstimate{},
      {.gpu = gpu.value_or(GpuProperties{}), .ranks = ranks, .hosts = std::max(1, options.hosts)});
  print_row("disk: checkpoint", mib(checkpoint_bytes(config, stage.model)));
  print_examples(stage, options.full);
  print_notes(config, stage);
  return error;
}

}  // namespace

int check(const CheckOptions& options) {
  std::optional<GpuProperties> gpu;
  std::string assumed;
  if (options.gpu) gpu = gpu_named(*options.gpu);
  RunPlan plan =
      load_plan(options.config, gpu ? gpu_overrides(options, assumed) : options.overrides);
  hold_nothing_out_of_few(plan);
  if (options.gpus > 0) expect_cuda(plan);
  if (options.hosts > 0 && options.gpus % options.hosts != 0)
    throw InputError(str("--hosts: ", options.gpus, " GPUs are not the same number on each of ",
                         options.hosts, " hosts; hint: --gpus ",
                         round_up(options.gpus, options.hosts)));
  if (gpu) print_row("assumed", assumed);
  if (!gpu) check_adapters_have_model(plan);
  std::vector<StagePreview> stages = preview_plan(plan);
  for (size_t i = 0; i < stages.size(); ++i)
    check_images(plan.stages[i].data.images, stages[i].model.channels);
  std::string memory_error;
  for (size_t i = 0; i < stages.size(); ++i)
    if (const std::string error = check_stage(plan.stages[i], stages[i], options, gpu);
        memory_error.empty())
      memory_error = error;
  plan.output_dir = next_run_directory(plan.output_dir);
  if (!memory_error.empty()) throw InputError(memory_error);
  // A plan for another machine's GPU says nothing about this machine's disk.
  const DiskNeed disk = disk_need(plan, stages, gpu ? INT64_MAX : free_disk_bytes(plan.output_dir));
  print_row("disk: checkpoints of the run",
            str(mib(disk.most), " at most",
                disk.free == INT64_MAX ? "" : str("; free: ", mib(disk.free))));
  if (!disk.shortage().empty()) logging::warn(disk.shortage());
  print(stdout, str(options.config, ": ok; a run would go to ", plan.output_dir, "\n"));
  return kOk;
}

}  // namespace cohort::apps
