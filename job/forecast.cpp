#include "job/forecast.h"

#include <cmath>

#include "distributed/dry_communicator.h"
#include "job/resources.h"
#include "nn/kv_cache.h"
#include "nn/precision.h"
#include "trainers/dry_update.h"

namespace cohort {
namespace {

// Shares of the data sheet's rates that steps of 0.5B and 8B reach (bench/results/h200.md): GEMMs
// 65 to 71 % forward, 65 and with an activation's gradient 39 % backward, the head 54 to 57 %,
// AdamW 86 %; attention with heads of 128 and 4,096 tokens 65 and 53 %, of 64 half of it.
constexpr double kForward = 0.68, kBackward = 0.6, kHead = 0.53, kAdamW = 0.86, kMemory = 0.9,
                 kAttentionForward = 0.6, kAttentionBackward = 0.5;
constexpr double kFullHead = 128;  // the width from which attention reaches these
// The generic kernels that GPUs of compute capability 10.0 run; not measured.
constexpr double kGenericAttention = 0.3;
// Bytes of a token that norms, positions and residual sums move in a layer, per column.
constexpr double kNormsForward = 20, kNormsBackward = 36;
// An all_reduce of NCCL between two H100 has 329 GB/s of the 450; assumed of networks too.
constexpr double kLink = 0.73;
// Seconds of a layer in a decode step besides: launches, norms, sampling.
constexpr double kLayerStep = 30e-6;
// Bytes per second: a writer of a checkpoint, and a disk, which is an assumption.
constexpr double kWriter = 1e9, kDisk = 5e9;

double number(int64_t n) {
  return static_cast<double>(n);
}

// The work of a rank in a step.
struct RankWork {
  double tokens = 0, targets = 1, length = 0;  // length: of a sequence
  double balance = 1;
  int64_t updates = 1, micro_batches = 1;  // in the step, in an update
};

RankWork work_of(const TrainConfig& config, const StagePreview& stage, int64_t ranks) {
  const StepSize size = step_size(config, stage, ranks);
  const BatchConfig& batch = config.batch;
  RankWork out{.tokens = number(size.tokens),
               .targets = size.memory.targets,
               .length = stage.lengths.mean_sequence - 1,
               .updates = updates_per_step(config)};
  double pieces = number(batch.batch_size);   // sequences or groups that go to a rank whole
  if (batch.trainer == TrainerType::kGrpo) {  // a group's completions share the prompt
    const double prompt = number(stage.lengths.longest_prompt),
                 sampled = number(batch.completions_per_step()) *
                           (number(size.memory.rollout_length) - prompt),
                 rows = number(batch.prompts_per_step) * prompt + sampled;
    out.tokens = number(config.grpo.num_iterations) * rows;
    out.targets = sampled / rows;
    out.length = number(size.longest_sequence);
    pieces = number(batch.prompts_per_step) / number(config.grpo.num_minibatches);
  }
  out.balance = std::ceil(pieces / number(ranks)) * number(ranks) / pieces;
  out.tokens *= out.balance / number(ranks);
  out.micro_batches =
      static_cast<int64_t>(std::ceil(out.tokens / number(out.updates) /
                                     number(std::max<int64_t>(1, size.memory.micro_batch_tokens))));
  return out;
}

// Seconds of a token in forward and backward.
std::pair<double, double> token_seconds(const ModelConfig& c, const RankWork& work,
                                        const GpuProperties& gpu) {
  const ModelSize size = model_size(c);
  // GEMMs for each weight: y, dx and, unless it is frozen, dw.
  const double passes = size.adapters > 0 ? 2 : 3, layers = number(c.num_layers),
               head = 2 * work.targets * number(size.head_parameters) / kHead,
               all = train_flops_per_token(c, 0, work.targets), body = all / passes - kHead * head,
               attention = (train_flops_per_token(c, work.length, work.targets) - all) /
                           (3 * std::min(1.0, number(c.head_dim) / kFullHead) *
                            (gpu.compute_capability >= 100 ? kGenericAttention : 1)),
               norms = layers * number(c.d_model) / (kMemory * gpu.bandwidth),
               blocks = (body / kForward + attention / kAttentionForward) / gpu.flops +
                        kNormsForward * norms;
  double backward =
      ((passes - 1) * (body / kBackward + head) + 2 * attention / kAttentionBackward) / gpu.flops +
      kNormsBackward * norms;
  if (c.recompute == Recompute::kBlock) backward += blocks;
  if (c.recompute == Recompute::kCheap)  // the activation, of gate and up: 3 bf16 a column
    backward += 6 * layers * number(c.d_ff) / (kMemory * gpu.bandwidth);
  return {blocks + head / gpu.flops, backward};
}

double rollout_seconds(const TrainConfig& config, const StagePreview& stage,
                       const MemoryEstimate& memory, const Cluster& cluster) {
  if (config.batch.trainer != TrainerType::kGrpo) return 0;
  const ModelConfig& c = stage.model;
  const GpuProperties& gpu = cluster.gpu;
  const DType dtype = cache_dtype(c, config.dtype);
  const MemoryShape shape = step_size(config, stage, cluster.ranks).memory;
  const int64_t prompts = ceil_div(config.batch.prompts_per_step, cluster.ranks);
  const double sequences = number(prompts * config.batch.num_generations),
               prompt = number(stage.lengths.longest_prompt),
               sampled = number(shape.rollout_length) - prompt,
               token = number(block_bytes(c, dtype)) / KVCacheConfig::kBlockTokens,
               of_sequence = token * number(shape.rollout_length) + number(state_bytes(c, dtype)),
               rows = std::clamp(number(memory.cache) / of_sequence, 1.0,
                                 number(shape.rollout_sequences)),
               cache = token * (prompt + sampled / 2) + 2 * number(state_bytes(c, dtype)),
               gemms = 2 * number(model_size(c).matmul_parameters) / (kForward * gpu.flops),
               one = (number(memory.parameters) + rows * cache) / (kMemory * gpu.bandwidth) +
                     rows * gemms + number(c.num_layers) * kLayerStep;
  return sampled * std::max(1.0, sequences / rows) * one + number(prompts) * prompt * gemms;
}

// The share of gathered weights that goes to other hosts. They pass from rank to rank,
// and from host to host through all cards of a host.
double far_gathers(const Cluster& cluster) {
  return cluster.hosts > 1 ? number(cluster.hosts) / number(cluster.ranks) : 0;
}
double send_seconds(int64_t bytes, double far, const GpuProperties& gpu) {
  return number(bytes) * std::max((1 - far) / gpu.link, far / gpu.network) / kLink;
}

// Seconds of an update's collectives that nothing hides. `backward`: of a micro batch.
double communication_seconds(const TrainConfig& config, const StagePreview& stage,
                             const RankWork& work, double backward, const Cluster& cluster) {
  if (cluster.ranks == 1) return 0;
  const Sharding sharding = config.optimizer.sharding;
  const UpdateTraffic traffic = update_traffic(config, stage, cluster.ranks, cluster.hosts);
  const double rounds = sums_each_micro_batch(sharding) ? number(work.micro_batches) : 1,
               far = far_gathers(cluster),
               sums = send_seconds(traffic.gradients, traffic.far, cluster.gpu),
               blocks = send_seconds(traffic.blocks, far, cluster.gpu),
               gathers = send_seconds(traffic.weights - traffic.blocks, far, cluster.gpu);
  // The sums of the tables come last, and the gathers beside AdamW, which needs the same bandwidth
  // of memory: neither counts as hidden.
  const ModelSize size = model_size(stage.model);
  const double tables = size.adapters > 0 ? 0
                                          : number(stage.model.vocab_size * stage.model.d_model) /
                                                number(size.parameters);
  return std::max(0.0, sums + blocks - rounds * backward) + tables * sums / rounds + gathers +
         number(traffic.exchanges) * (100e-6 + 2e-6 * number(cluster.ranks));
}

// Seconds of the optimizer in an update.
double optimizer_seconds(const TrainConfig& config, const ModelConfig& model,
                         const Cluster& cluster) {
  const OptimizerBytes bytes =
      optimizer_bytes(config.optimizer, model, config.dtype, Device::cuda(), cluster.ranks);
  // State and weights are read and written, f32 gradients read.
  const double parts = is_sharded(config.optimizer.sharding) ? number(cluster.ranks) : 1,
               moved = 2 * number(bytes.memory + bytes.pinned) +
                       8 * number(model_size(model).trained()) / parts;
  return std::max(moved / (kAdamW * cluster.gpu.bandwidth), streaming_seconds(bytes.pinned));
}

}  // namespace

UpdateTraffic update_traffic(const TrainConfig& config, const StagePreview& stage, int64_t ranks,
                             int64_t hosts) {
  const Sharding sharding = config.optimizer.sharding;
  const auto with = [&](int64_t micro_batches) {
    DryCommunicator comm(0, static_cast<int>(ranks), static_cast<int>(hosts));
    dry_update(stage.model, config.dtype, device_named(config.device, "device"), config.optimizer,
               micro_batches, comm);
    UpdateTraffic out;
    int64_t far = 0;
    for (const DryCommunicator::Call& call : comm.calls()) {
      const bool sums = call.text.starts_with("all_to_all"),
                 gathers = call.text.starts_with("all_gather");
      out.exchanges += !sums && !gathers;
      if (gathers && is_sharded(sharding)) out.weights += call.sent;
      if (!sums && (!gathers || is_sharded(sharding))) continue;
      out.gradients += call.sent;
      far += call.far;
    }
    if (far > 0) out.far = number(far) / number(out.gradients);
    return out;
  };
  UpdateTraffic out = with(1);
  if (!sums_each_micro_batch(sharding)) return out;
  const UpdateTraffic two = with(2);
  const int64_t more = work_of(config, stage, ranks).micro_batches - 1,
                blocks = two.weights - out.weights;
  out.gradients += more * (two.gradients - out.gradients);
  out.weights += more * blocks;
  out.blocks = (more + 1) * blocks;
  return out;
}

std::optional<StepForecast> forecast_step(const TrainConfig& config, const StagePreview& stage,
                                          const MemoryEstimate& memory, const Cluster& cluster) {
  if (config.dtype != DType::kBF16 || cluster.gpu.bandwidth == 0) return std::nullopt;
  const RankWork work = work_of(config, stage, cluster.ranks);
  const auto [forward, backward] = token_seconds(stage.model, work, cluster.gpu);
  const double updates = number(work.updates), of_update = work.tokens / updates;
  StepForecast out{.balance = work.balance};
  out.rollout = rollout_seconds(config, stage, memory, cluster);
  // Each micro batch reads and writes the f32 gradients.
  out.update = work.tokens * (forward + backward) + updates * number(work.micro_batches) * 8 *
                                                        number(model_size(stage.model).trained()) /
                                                        (kMemory * cluster.gpu.bandwidth);
  if (config.batch.trainer == TrainerType::kGrpo && config.grpo.beta > 0)  // the reference's pass
    out.update += work.tokens / number(config.grpo.num_iterations) *
                  token_seconds(stage.teacher.value_or(stage.model), work, cluster.gpu).first;
  out.optimizer = updates * optimizer_seconds(config, stage.model, cluster);
  out.communication =
      updates * communication_seconds(config, stage, work,
                                      of_update / number(work.micro_batches) * backward, cluster);
  out.tokens = number(step_size(config, stage, cluster.ranks).tokens) / out.step();
  if (cluster.ranks > 1)
    out.scaling =
        out.tokens /
        forecast_step(config, stage, memory_of(config, stage, 1), {.gpu = cluster.gpu})->tokens;
  const double writers = is_sharded(config.optimizer.sharding) ? number(cluster.ranks) : 1,
               seconds = number(config.batch.steps) * out.step(),
               every = config.checkpoint.every > 0 ? number(config.checkpoint.every) * out.step()
                                                   : 60 * config.checkpoint.every_minutes,
               saves = 1 + (every > 0 ? seconds / every : 0);
  out.save = number(checkpoint_bytes(config, stage.model)) / std::min(kDisk, kWriter * writers);
  out.days = (seconds + saves * out.save) / 86400;
  return out;
}

}  // namespace cohort
