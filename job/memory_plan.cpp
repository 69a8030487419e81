#include "job/memory_plan.h"

#include <cmath>

#include "nn/kv_cache.h"

namespace cohort {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

// Device memory that no tensor gets: the CUDA context, cuBLASLt and the kernels, which are loaded
// at their first launch. An H100 takes 524 MiB (bench/results/h200.md); the rest is for a display.
constexpr int64_t kCudaBytes = 1024 * kMiB;
// Buffers of NCCL's communicator for one set of connections: on each of 32 channels 10 MiB to
// receive (512 KiB of LL, 4.7 of LL128, 4 of Simple, in units of 2 MiB) and 2 MiB to send. There is
// a set for the rings, and with all_to_all one for each other GPU of the host: 3.28 GB were seen on
// eight H100 (NVIDIA/nccl#1685). GPUs with slower links take fewer channels.
constexpr int64_t kNcclSetBytes = 32 * (10 + 2) * kMiB, kMostGpusOfHost = 8;
// Fraction of the rest that tensors may use. Segments of the allocator are not joined, and the
// estimate is up to 1.3 % below the measured peak (bench/results/h200.md).
constexpr double kUsable = 0.95;
// Free memory of the host that has the GPU, which a plan cannot know: it says what it needs.
constexpr int64_t kUnknownHost = int64_t{1} << 60;
// Host memory of a process with a CUDA context (bench/results/h200.md: 0.48 GB with a tiny model).
constexpr int64_t kProcessBytes = 512 * kMiB;
// The rank of adapters that a plan suggests.
constexpr int64_t kSuggestedRank = 16;
// Fraction of free memory that choices may take; kernels and libraries allocate the rest.
constexpr double kChosenFraction = 0.9;

// The model of the stage as `config` trains it.
ModelConfig planned_model(const TrainConfig& config, const StagePreview& stage) {
  ModelConfig model = stage.model;
  model.recompute = config.model.recompute;
  model.lora = config.model.lora;
  model.precision = config.model.precision;
  return model;
}

int64_t free_bytes(const GpuProperties& gpu, int64_t ranks) {
  return gpu.memory - kCudaBytes - nccl_bytes(ranks);
}

int64_t fraction_of(double fraction, int64_t bytes) {
  return static_cast<int64_t>(fraction * static_cast<double>(std::max<int64_t>(0, bytes)));
}

// Tokens of a cache in `bytes`, in whole blocks.
int64_t cache_tokens(const ModelConfig& model, int64_t bytes, DType dtype) {
  const int64_t block = std::max<int64_t>(1, block_bytes(model, cache_dtype(model, dtype)));
  return bytes / block * KVCacheConfig::kBlockTokens;
}

// Bytes of a row's states in a cache, with its share of the spare ones.
int64_t row_state_bytes(const ModelConfig& model, DType dtype) {
  return static_cast<int64_t>(KVCacheConfig::kStatesPerRow *
                              static_cast<double>(state_bytes(model, cache_dtype(model, dtype))));
}

// The memory of a rank with `free` bytes, of which the engine's cache takes its share.
MemoryEstimate memory_with(TrainConfig config, const StagePreview& stage, int64_t ranks,
                           int64_t free) {
  const int64_t persistent = memory_of(config, stage, ranks, CacheSize::kSequence).persistent(),
                share = fraction_of(config.rollout.memory_fraction, free - persistent);
  if (config.rollout.max_cache_tokens == 0) {
    const MemoryShape shape = step_size(config, stage, ranks).memory;
    int64_t states = 0;
    if (stage.model.has_delta() && shape.rollout_sequences > 0) {
      const DType dtype = cache_dtype(stage.model, config.dtype);
      const auto block = static_cast<double>(std::max<int64_t>(1, block_bytes(stage.model, dtype)));
      config.rollout.max_concurrent = std::min(
          shape.rollout_sequences,
          fitting_sequences(
              static_cast<double>(share) / block,
              static_cast<double>(state_bytes(stage.model, dtype)) / block,
              static_cast<double>(ceil_div(shape.rollout_length, KVCacheConfig::kBlockTokens))));
      states = config.rollout.max_concurrent * row_state_bytes(stage.model, config.dtype);
    }
    config.rollout.max_cache_tokens =
        std::max<int64_t>(1, cache_tokens(stage.model, share - states, config.dtype));
  }
  return memory_of(config, stage, ranks);
}

// The number nearest to `bad` that is still good. `good` counts as good, `bad` as bad.
template <class Good>
int64_t bisect(int64_t good, int64_t bad, const Good& is_good) {
  while (std::abs(bad - good) > 1) {
    const int64_t middle = (good + bad) / 2;
    (is_good(middle) ? good : bad) = middle;
  }
  return good;
}

std::string choose_micro_batch(TrainConfig& config, const StagePreview& stage, int64_t ranks,
                               int64_t available) {
  if (config.batch.micro_batch_tokens) return "";
  constexpr int64_t kUnit = 1024, kMost = 32768;
  // On CUDA an update uses the memory of the cache, which adapts to what is free.
  const CacheSize cache =
      device_named(config.device, "device").is_cuda() ? CacheSize::kSequence : CacheSize::kRollout;
  // Returns true if micro batches of `tokens` tokens fit. Sets config to the tokens clamped to at
  // least a sequence and at most a rank's part of the step, and `peak` to their memory.
  int64_t peak = 0;
  const auto fits = [&](int64_t tokens) {
    config.batch.micro_batch_tokens = tokens;
    config.batch.micro_batch_tokens = step_size(config, stage, ranks).memory.micro_batch_tokens;
    peak = memory_of(config, stage, ranks, cache).peak();
    return peak <= fraction_of(kChosenFraction, available);
  };
  Recompute& recompute = config.model.recompute;
  while (recompute != Recompute::kBlock && !fits(kMicroBatchTokens))
    recompute = static_cast<Recompute>(static_cast<int>(recompute) + 1);
  const int64_t units =
      bisect(0, kMost / kUnit + 1, [&](int64_t count) { return fits(count * kUnit); });
  const bool any = fits(std::max<int64_t>(1, units * kUnit));
  return str(*config.batch.micro_batch_tokens,
             " tokens, model.recompute: ", kRecomputeNames[static_cast<size_t>(recompute)].name,
             "; estimated ", mib(peak), " of ", mib(available), " free",
             any ? "" : ", which is too little");
}

// The first kind that fits with the state on the device, else the smallest.
std::string choose_sharding(TrainConfig& config, const StagePreview& stage, int64_t ranks,
                            int64_t available) {
  Sharding& sharding = config.optimizer.sharding;
  if (sharding != Sharding::kAuto) return "";
  sharding = Sharding::kNone;
  if (ranks == 1 || !device_named(config.device, "device").is_cuda()) return "";
  const auto fits = [&](Sharding kind) {
    TrainConfig tried = config;
    tried.optimizer.sharding = kind;
    tried.optimizer.storage.place = StatePlace::kDevice;
    choose_micro_batch(tried, stage, ranks, available);
    return memory_of(tried, stage, ranks, CacheSize::kSequence).peak() <=
           fraction_of(kChosenFraction, available);
  };
  const bool has_lanes = config.optimizer.reduction_lanes > 0;
  const bool has_second_forward = config.batch.trainer == TrainerType::kGrpo &&
                                  config.grpo.distills_itself(config.model.lora.rank > 0);
  sharding = has_lanes || fits(Sharding::kOptimizer)            ? Sharding::kOptimizer
             : has_second_forward || fits(Sharding::kGradients) ? Sharding::kGradients
                                                                : Sharding::kFull;
  const OptimizerBytes bytes =
      optimizer_bytes(config.optimizer, stage.model, config.dtype, Device::cuda(), ranks);
  return str(entry_of(kShardingNames, sharding).name, ", of which each of ", ranks, " ranks holds ",
             mib(bytes.memory + bytes.gradients + bytes.weights));
}

std::string choose_place(TrainConfig& config, const StagePreview& stage, int64_t ranks,
                         const FreeMemory& free) {
  OptimizerStorage& storage = config.optimizer.storage;
  if (storage.place != StatePlace::kAuto) return "";
  storage.place = StatePlace::kDevice;
  storage.host_units = 0;
  const Device device = device_named(config.device, "device");
  if (!device.is_cuda()) return "";
  const auto fits = [&](const TrainConfig& tried, CacheSize cache) {
    return memory_of(tried, stage, ranks, cache).peak() <=
           fraction_of(kChosenFraction, free.device);
  };
  TrainConfig on_device = config, on_host = config;
  on_host.optimizer.storage.place = StatePlace::kHost;
  for (TrainConfig* tried : {&on_device, &on_host})
    choose_micro_batch(*tried, stage, ranks, free.device);
  const bool recomputes_blocks =
      on_device.model.recompute == Recompute::kBlock && config.model.recompute != Recompute::kBlock;
  // The state of adapters is so small that its place may change nothing.
  const bool host_changes_nothing =
      on_host.model.recompute == on_device.model.recompute &&
      on_host.batch.micro_batch_tokens == on_device.batch.micro_batch_tokens;
  if (fits(on_device, CacheSize::kSequence) && (!recomputes_blocks || host_changes_nothing))
    return "";
  int64_t& units = on_host.optimizer.storage.host_units;
  const auto pinned = [&] {
    return optimizer_bytes(on_host.optimizer, stage.model, config.dtype, device, ranks).pinned;
  };
  if (!fits(on_host, CacheSize::kSequence) || pinned() > fraction_of(kChosenFraction, free.host))
    return "";
  // With the state of `good` units on the host all fits, or all are there.
  const int64_t all = num_units(stage.model), good = bisect(all, 0, [&](int64_t count) {
                                                units = count;
                                                return fits(on_host, CacheSize::kRollout);
                                              });
  units = good == all ? 0 : good;
  storage = on_host.optimizer.storage;
  return str("host, for ", good, " of the model's ", all, " units: ", mib(pinned()),
             " of page-locked memory, which an update streams in about ",
             std::round(10 * streaming_seconds(pinned())) / 10, " s");
}

// The overrides that make `given` from the stage's configuration.
std::string changes_between(const TrainConfig& given, const TrainConfig& planned) {
  std::string out = str("micro_batch_tokens=", planned.batch.micro_batch());
  if (planned.model.lora.rank != given.model.lora.rank)
    out = str("lora.rank=", planned.model.lora.rank, " ", out);
  if (planned.model.precision.base != given.model.precision.base)
    out = str("precision.base=", entry_of(kBaseNames, planned.model.precision.base).name, " ", out);
  if (planned.model.recompute != given.model.recompute)
    out += str(" model.recompute=",
               kRecomputeNames[static_cast<size_t>(planned.model.recompute)].name);
  if (planned.optimizer.storage.moments != given.optimizer.storage.moments)
    out += " optimizer.moments=bf16";
  if (given.optimizer.storage.place == StatePlace::kDevice &&
      planned.optimizer.storage.place == StatePlace::kHost)
    out += " optimizer.place=auto";
  return out;
}

std::string shortage_of(const GpuPlan& plan, const GpuProperties& gpu) {
  const MemoryEstimate& memory = plan.memory;
  std::string text = str(trainer_name(plan.config.batch.trainer), " needs at least ",
                         mib(memory.peak()), " of the ", mib(plan.usable), " that ", gpu.name,
                         " has for it, ", mib(memory.peak() - plan.usable), " too much");
  if (const int64_t all = memory.persistent() + memory.gradients + memory.weights - memory.released;
      all > plan.usable)
    return str(text, ": the weights, gradients and AdamW's state alone take ", mib(all),
               "; hint: a smaller model, or a GPU with more memory");
  return text +
         (memory.cache > 0 && memory.rollout + memory.cache > memory.activations + memory.workspace
              ? "; hint: a smaller max_concurrent, rollout.memory_fraction or "
                "max_completion_length"
          : memory.cache > 0 ? "; hint: a smaller max_completion_length or shorter prompts"
                             : "; hint: shorter sequences, by data.too_long or "
                               "model.context");
}

// Sizes that are rows or columns of GEMMs, which cuBLASLt loads by TMA if they are multiples of 8,
// and the time of a training step without it, relative to the next multiple of 8, where it was
// measured (bench/results/h200.md, the 124M shape; 0: it was not).
struct GemmSize {
  const char* key;
  int64_t (*value)(const ModelConfig&);
  double slowdown;
};
constexpr int64_t kGemmUnit = 8;
constexpr GemmSize kGemmSizes[] = {
    {"model.d_model", [](const ModelConfig& c) { return c.d_model; }, 2.5},
    {"model.d_ff", [](const ModelConfig& c) { return c.d_ff; }, 1.6},
    {"model.num_heads * head_dim", [](const ModelConfig& c) { return c.num_heads * c.head_dim; },
     0},
    {"model.num_kv_heads * head_dim",
     [](const ModelConfig& c) { return c.num_kv_heads * c.head_dim; }, 0},
};

}  // namespace

StepSize step_size(const TrainConfig& config, const StagePreview& stage, int64_t ranks) {
  StepSize out{.longest_sequence = stage.lengths.longest_sequence - 1};
  MemoryShape& memory = out.memory;
  memory.device = device_named(config.device, "device");
  if (config.batch.trainer == TrainerType::kGrpo) {
    const int64_t of_rank =
        ceil_div(config.batch.prompts_per_step, ranks) * config.batch.num_generations;
    memory.rollout_length =
        config.sampling.max_length(stage.lengths.longest_prompt, stage.model.context);
    out.longest_sequence = memory.rollout_length - 1;
    out.tokens = config.batch.completions_per_step() * out.longest_sequence;
    memory.rollout_sequences = config.rollout.concurrent(of_rank);
    memory.rollout_prefill_tokens =
        std::min(kPrefillTokens, memory.rollout_sequences * stage.lengths.longest_prompt);
    memory.max_cache_tokens = config.rollout.max_cache_tokens;
    if (stage.teacher)
      memory.reference = *stage.teacher;
    else if (config.grpo.beta > 0 && config.model.lora.rank == 0 &&
             config.grpo.reference_type() != ReferenceType::kPolicy)
      memory.reference = planned_model(config, stage);
    memory.distills = config.grpo.distills();
  } else {
    out.tokens = static_cast<int64_t>(static_cast<double>(config.batch.batch_size) *
                                      (stage.lengths.mean_sequence - 1));
    if (config.batch.trainer == TrainerType::kMlm) memory.targets = config.masking.probability;
    if (config.batch.trainer == TrainerType::kClassify)
      memory.targets = 1 / (stage.lengths.mean_sequence - 1);
  }
  const OptimizerBytes optimizer = optimizer_bytes(config.optimizer, planned_model(config, stage),
                                                   config.dtype, memory.device, ranks);
  memory.gradients = optimizer.gradients;
  memory.optimizer = optimizer.memory;
  memory.optimizer_workspace = optimizer.workspace;
  memory.weights = optimizer.weights;
  memory.released = optimizer.released;
  memory.micro_batch_tokens = std::min(std::max(config.batch.micro_batch(), out.longest_sequence),
                                       ceil_div(out.tokens, ranks));
  return out;
}

MemoryEstimate memory_of(const TrainConfig& config, const StagePreview& stage, int64_t ranks,
                         CacheSize cache) {
  MemoryShape shape = step_size(config, stage, ranks).memory;
  if (cache == CacheSize::kSequence) {
    shape.max_cache_tokens = shape.rollout_length;
    if (stage.model.has_delta())
      shape.rollout_sequences = std::min<int64_t>(1, shape.rollout_sequences);
  }
  return estimate_memory(planned_model(config, stage), config.dtype, shape);
}

int64_t nccl_bytes(int64_t ranks) {
  return ranks > 1 ? kNcclSetBytes * std::min(ranks, kMostGpusOfHost) : 0;
}

MemoryChoice choose_by_memory(TrainConfig& config, const StagePreview& stage, int64_t ranks,
                              const FreeMemory& free) {
  std::string sharding = choose_sharding(config, stage, ranks, free.device),
              place = choose_place(config, stage, ranks, free);
  return {choose_micro_batch(config, stage, ranks, free.device), std::move(place),
          std::move(sharding)};
}

int64_t updates_per_step(const TrainConfig& config) {
  return config.batch.trainer == TrainerType::kGrpo ? config.grpo.updates_per_step() : 1;
}

std::string slow_streaming(double streaming_seconds, double other_seconds) {
  if (streaming_seconds <= 0.5 * other_seconds) return "";
  const auto text = [](double seconds) { return std::round(100 * seconds) / 100; };
  return str("optimizer state on the host: ", text(streaming_seconds), " s beside ",
             text(other_seconds), " s of an update; hint: more tokens an update");
}

GpuPlan plan_for_gpu(const TrainConfig& config, const StagePreview& stage, int64_t ranks,
                     const GpuProperties& gpu) {
  const int64_t free = free_bytes(gpu, ranks) / config.ranks;
  GpuPlan plan{.usable = fraction_of(kUsable, free)};
  // True if `tried` fits, which becomes the plan's configuration.
  const auto fits = [&](TrainConfig tried) {
    choose_by_memory(tried, stage, ranks, {.device = free, .host = kUnknownHost});
    plan.memory = memory_with(tried, stage, ranks, free);
    plan.config = std::move(tried);
    return plan.memory.peak() <= plan.usable;
  };
  plan.runs = fits(config);
  plan.given = plan.memory.peak();
  if (plan.runs) return plan;
  TrainConfig tried = config;
  tried.batch.micro_batch_tokens.reset();
  bool any = config.batch.micro_batch_tokens && fits(tried);
  if (!any && config.optimizer.storage.moments == MomentKind::kF32 && config.dtype != DType::kF64) {
    tried.optimizer.storage.moments = MomentKind::kBF16;
    any = fits(tried);
  }
  if (!any && config.optimizer.storage.place == StatePlace::kDevice) {
    tried.optimizer.storage.place = StatePlace::kAuto;
    any = fits(tried);
  }
  if (!any && config.model.lora.rank == 0) {
    tried.optimizer.storage = config.optimizer.storage;
    tried.model.lora.rank = kSuggestedRank;
    any = fits(tried);
  }
  for (const auto base : {kernels::WeightFormat::kInt8, kernels::WeightFormat::kNf4})
    if (const auto found = stage.model.stored_format;
        !any && !config.model.precision.is_quantized() && !stage.model.is_encoder() &&
        !stage.model.has_delta() && (found == kernels::WeightFormat::kModel || found == base)) {
      tried.model.precision.base = base;
      any = fits(tried);
    }
  if (any)
    plan.changes = changes_between(config, plan.config);
  else
    plan.shortage = shortage_of(plan, gpu);
  return plan;
}

InferencePlan plan_inference(const ModelConfig& model, int64_t length, const GpuProperties& gpu) {
  const MemoryEstimate memory =
      estimate_memory(model, DType::kBF16,
                      {.rollout_sequences = 1,
                       .rollout_length = length,
                       .rollout_prefill_tokens = std::min(length, kPrefillTokens),
                       .device = Device::cuda()});
  InferencePlan out{.weights = memory.parameters};
  const int64_t free = free_bytes(gpu, 1) - memory.parameters,
                cache = std::min(
                    fraction_of(EngineConfig{}.memory_fraction, free),
                    fraction_of(kUsable, free_bytes(gpu, 1)) - memory.parameters - memory.rollout);
  if (cache < memory.cache) return out;
  const int64_t state = row_state_bytes(model, DType::kBF16),
                of_one = memory.cache - memory.states + state;
  if (state > 0) out.sequences = std::max<int64_t>(1, cache / of_one);
  out.state = memory.states;
  out.cache_tokens = cache_tokens(model, cache - out.sequences * state, DType::kBF16);
  if (block_bytes(model, DType::kBF16) == 0) out.cache_tokens = out.sequences * length;
  if (state == 0) out.sequences = out.cache_tokens / length;
  return out;
}

int64_t host_memory(const TrainConfig& config, const ModelConfig& model, int64_t processes) {
  const OptimizerBytes optimizer = optimizer_bytes(
      config.optimizer, model, config.dtype, device_named(config.device, "device"), processes);
  return processes * (kProcessBytes + optimizer.host + optimizer.pinned);
}

std::string streaming_note(int64_t pinned, double flops, const GpuProperties& gpu) {
  if (pinned == 0 || gpu.flops == 0) return "";
  // Training reaches about half of the data sheet's rate.
  return slow_streaming(streaming_seconds(pinned), flops / (0.5 * gpu.flops));
}

std::vector<std::string> slow_sizes(const ModelConfig& model) {
  std::vector<std::string> out;
  for (const auto& [key, value, slowdown] : kGemmSizes) {
    const int64_t size = value(model);
    if (size % kGemmUnit == 0) continue;
    const std::string factor = slowdown > 0
                                   ? str("by a factor of ", slowdown, " where it was measured")
                                   : "by a factor that was not measured";
    out.push_back(str(key, ": ", size, " is no multiple of ", kGemmUnit,
                      ", which slows a step down on a GPU, ", factor,
                      "; hint: ", round_up(size, kGemmUnit)));
  }
  return out;
}

}  // namespace cohort
