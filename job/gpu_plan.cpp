#include "job/gpu_plan.h"

#include <algorithm>

#include "nn/kv_cache.h"

namespace cohort {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

// Device memory that no tensor gets: the CUDA context, cuBLASLt and the kernels, which are loaded
// at their first launch. An H100 takes 524 MiB (bench/results/h200.md); the rest is for a display.
constexpr int64_t kCudaBytes = 1024 * kMiB;
// Buffers of NCCL with several GPUs, an allowance as well.
constexpr int64_t kNcclBytes = 1024 * kMiB;
// Fraction of the rest that tensors may use. Segments of the allocator are not joined, and the
// estimate is up to 1.3 % below the measured peak (bench/results/h200.md).
constexpr double kUsable = 0.95;
// Free memory of the host that has the GPU, which a plan cannot know: it says what it needs.
constexpr int64_t kUnknownHost = int64_t{1} << 60;
// Host memory of a process with a CUDA context (bench/results/h200.md: 0.48 GB with a tiny model).
constexpr int64_t kProcessBytes = 512 * kMiB;
// The rank of adapters that a plan suggests.
constexpr int64_t kSuggestedRank = 16;

int64_t free_bytes(const GpuProperties& gpu, int64_t ranks) {
  return gpu.memory - kCudaBytes - (ranks > 1 ? kNcclBytes : 0);
}

int64_t fraction_of(double fraction, int64_t bytes) {
  return static_cast<int64_t>(fraction * static_cast<double>(std::max<int64_t>(0, bytes)));
}

// Tokens of a cache in `bytes`, in whole blocks.
int64_t cache_tokens(const ModelConfig& model, int64_t bytes, DType dtype) {
  const int64_t block = KVCache::bytes({.num_layers = model.num_layers,
                                        .num_kv_heads = model.num_kv_heads,
                                        .head_dim = model.head_dim,
                                        .num_blocks = 1},
                                       dtype);
  return bytes / block * KVCacheConfig::kBlockTokens;
}

// The memory of a rank with `free` bytes, of which the engine's cache takes its share.
MemoryEstimate memory_with(const TrainConfig& config, const StagePreview& stage, int64_t ranks,
                           int64_t free) {
  ModelConfig model = stage.model;
  model.recompute = config.model.recompute;
  MemoryShape shape = step_size(config, stage, ranks).memory;
  if (shape.rollout_sequences == 0) return estimate_memory(model, config.dtype, shape);
  const int64_t limit = shape.max_cache_tokens;
  shape.max_cache_tokens = shape.rollout_length;
  const MemoryEstimate least = estimate_memory(model, config.dtype, shape);
  const int64_t allowed = std::max<int64_t>(
      1, cache_tokens(model, fraction_of(config.rollout.memory_fraction, free - least.persistent()),
                      config.dtype));
  shape.max_cache_tokens = limit > 0 ? limit : allowed;
  return estimate_memory(model, config.dtype, shape);
}

// The overrides that make `given` from the stage's configuration.
std::string changes_between(const TrainConfig& given, const TrainConfig& planned) {
  std::string out = str("micro_batch_tokens=", planned.batch.micro_batch());
  if (planned.model.lora.rank != given.model.lora.rank)
    out = str("lora.rank=", planned.model.lora.rank, " ", out);
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
  if (const int64_t all = memory.persistent() + memory.gradients; all > plan.usable)
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

GpuPlan plan_for_gpu(const TrainConfig& config, const StagePreview& stage, int64_t ranks,
                     const GpuProperties& gpu) {
  const int64_t free = free_bytes(gpu, ranks) / config.ranks;
  GpuPlan plan{.usable = fraction_of(kUsable, free)};
  // True if `tried` fits, which becomes the plan's configuration.
  const auto fits = [&](TrainConfig tried) {
    StagePreview with_adapters = stage;
    with_adapters.model.lora = tried.model.lora;
    choose_place(tried, with_adapters, ranks, {.device = free, .host = kUnknownHost});
    choose_micro_batch(tried, with_adapters, ranks, free);
    plan.memory = memory_with(tried, with_adapters, ranks, free);
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
  if (cache >= memory.cache) out.cache_tokens = cache_tokens(model, cache, DType::kBF16);
  return out;
}

int64_t host_memory(const TrainConfig& config, const ModelConfig& model, int64_t processes) {
  const OptimizerBytes optimizer =
      optimizer_bytes(config.optimizer, model, config.dtype, device_named(config.device, "device"));
  return processes * (kProcessBytes + optimizer.host + optimizer.pinned);
}

std::string streaming_note(int64_t pinned, double flops, const GpuProperties& gpu) {
  // Dense bf16 FLOP/s of a multiprocessor (data sheets), of which training reaches about half.
  constexpr std::pair<int, double> kRates[] = {{80, 2.9e12}, {86, 0.87e12},  {89, 1.29e12},
                                               {90, 7.5e12}, {100, 15.2e12}, {120, 1.23e12}};
  const auto rate = std::find_if(std::begin(kRates), std::end(kRates), [&](const auto& entry) {
    return entry.first == gpu.compute_capability;
  });
  if (pinned == 0 || rate == std::end(kRates) || gpu.multiprocessors == 0) return "";
  return slow_streaming(streaming_seconds(pinned),
                        flops / (0.5 * rate->second * gpu.multiprocessors));
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
