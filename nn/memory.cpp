#include "nn/memory.h"

#include <algorithm>
#include <cmath>

#include "core/allocator.h"
#include "core/dry_run.h"
#include "core/sizes.h"

namespace cohort {
namespace {

// Rejects sizes whose bytes would overflow int64, by an upper bound computed in double.
void check_countable(const ModelConfig& c, const MemoryShape& shape) {
  const int64_t heads = (c.num_heads + c.num_kv_heads) * c.head_dim;
  const auto columns = static_cast<double>(8 * (c.d_model + heads) + 4 * c.d_ff + 64);
  const double states = c.has_delta() ? static_cast<double>(shape.rollout_sequences) *
                                            static_cast<double>(c.delta.channels()) *
                                            static_cast<double>(c.delta.value_dim + 128)
                                      : 0;
  const double tokens =
      static_cast<double>(shape.micro_batch_tokens) +
      static_cast<double>(shape.rollout_prefill_tokens) +
      static_cast<double>(shape.rollout_sequences) * static_cast<double>(shape.rollout_length);
  // 8 bytes per element, doubled for the rounding of allocations.
  const double bytes = 16 * (tokens * (columns * static_cast<double>(c.num_layers + 2) +
                                       static_cast<double>(c.vocab_size)) +
                             states * static_cast<double>(c.num_layers));
  if (bytes > 0x1p61)
    throw InputError(str("memory: this model and batch would take about ", bytes,
                         " bytes; hint: smaller sizes under model, or a smaller "
                         "micro_batch_tokens, max_concurrent or max_completion_length"));
}

// A model and a batch whose tensors have no storage.
struct DryModel {
  DryModel(const ModelConfig& config, DType dtype, int64_t tokens, double share, Device device)
      : run(device),
        model(config, dtype, std::nullopt, device),
        model_bytes(run.stats().live_bytes),
        batch(dry_batch(config, tokens, share, device)),
        before(run.stats().live_bytes) {}
  int64_t live() const { return run.stats().live_bytes - before; }
  int64_t peak() const { return run.stats().peak_bytes - before; }

  DryRun run;
  Transformer model;
  int64_t model_bytes;  // parameters, and the tables of positions
  PackedBatch batch;
  int64_t before;
};

// Fills in what an update needs of the model and its tape.
void measure_update(const ModelConfig& config, DType dtype, const MemoryShape& shape,
                    MemoryEstimate& out) {
  const int64_t tokens = shape.micro_batch_tokens;
  DryModel dry(config, dtype, tokens, shape.targets, shape.device);
  out.parameters = dry.model_bytes;
  const ParameterSet& set = dry.model.parameters();
  std::vector<Tensor> gradients;
  for (size_t unit = 0; unit < set.units().size(); ++unit)
    gradients.push_back(set.allocate_gradients(unit));
  const int64_t of_one_rank = dry.live();
  out.gradients = shape.gradients > 0 ? shape.gradients : of_one_rank;
  dry.before += of_one_rank;
  if (tokens == 0 || config.num_logits() == 0) return;
  const Tensor weights =
      Tensor::empty({dry.batch.num_targets()}, accumulate_dtype(dtype), shape.device);
  // As with sharded weights, where a block's output is kept that would be recomputed.
  if (shape.weights > 0) dry.model.before_block([](size_t) {});
  HeadLoss loss = cross_entropy(dry.model.hidden_at_targets(dry.batch, {.mode = Mode::kTrain}),
                                dry.model.head(), dry.batch.targets, weights);
  out.activations = dry.live();
  backward(std::move(loss));
  out.workspace = dry.peak() - out.activations;
}

int64_t measure_forward(const ModelConfig& config, DType dtype, int64_t tokens, Device device) {
  const DryModel dry(config, dtype, tokens, 1, device);
  NoGradGuard no_grad;
  dry.model.forward(dry.batch);
  return dry.peak();
}

// Number of tokens whose logits the head holds at a time.
int64_t head_chunk(const ModelConfig& c, int64_t tokens, Device device) {
  return std::min(tokens, kernels::head_chunk_tokens(c.vocab_size, 0, device));
}

}  // namespace

PackedBatch dry_batch(const ModelConfig& config, int64_t tokens, double targets, Device device) {
  if (config.has_images()) tokens = round_up(tokens, config.context);
  const auto count = static_cast<int64_t>(std::ceil(targets * static_cast<double>(tokens)));
  PackedBatch batch;
  for (Tensor* t : {&batch.tokens, &batch.positions})
    *t = Tensor::empty({tokens}, DType::kI32, device);
  for (Tensor* t : {&batch.target_positions, &batch.targets})
    *t = Tensor::empty({count}, DType::kI32, device);
  batch.sequences = Tensor::empty({tokens}, DType::kI64, device);
  batch.target_sequences = Tensor::empty({count}, DType::kI64, device);
  if (config.has_images()) {
    const int64_t side = config.image_size, images = ceil_div(tokens, config.context);
    batch.pixels = Tensor::empty({images, side * side * config.channels}, DType::kU8, device);
    batch.pixel_values = Tensor::empty({config.channels, 256}, DType::kF32, device);
    batch.tokens = {};
  }
  batch.cu_seqlens = Tensor::empty({2}, DType::kI32, device);
  return batch;
}

MemoryEstimate estimate_memory(const ModelConfig& c, DType dtype, const MemoryShape& shape) {
  check_countable(c, shape);
  MemoryEstimate out{.optimizer = shape.optimizer,
                     .weights = shape.weights,
                     .released = shape.released,
                     .optimizer_workspace = shape.optimizer_workspace,
                     .releases_cache = shape.device.is_cuda()};
  measure_update(c, dtype, shape, out);
  if (shape.reference)
    out.reference = DryModel(*shape.reference, dtype, 0, 1, shape.device).model_bytes;
  if (shape.distills) {  // its hidden states and its logits
    const int64_t tokens = shape.micro_batch_tokens,
                  width = shape.reference ? shape.reference->d_model : c.d_model,
                  vocab = std::max(c.vocab_size, shape.reference ? shape.reference->vocab_size : 0);
    const int64_t forward =
        measure_forward(shape.reference ? *shape.reference : c, dtype, tokens, shape.device);
    out.workspace = std::max(out.workspace, forward - out.activations);
    out.workspace += tokens * width * static_cast<int64_t>(dtype_size(dtype)) +
                     head_chunk(c, tokens, shape.device) * kernels::head_rows(vocab, shape.device) *
                         static_cast<int64_t>(dtype_size(accumulate_dtype(dtype)));
  }
  if (shape.rollout_sequences > 0) {
    KVCacheConfig cache = cache_config(c, shape.rollout_sequences, 0);
    cache.max_length = shape.rollout_length;
    // As the engine does: a block more than the longest sequence at least.
    const int64_t longest = ceil_div(shape.rollout_length, cache.block_tokens);
    if (shape.max_cache_tokens > 0)
      cache.num_blocks =
          std::clamp(shape.max_cache_tokens / cache.block_tokens, longest + 1,
                     std::max<int64_t>(shape.rollout_sequences * longest, longest + 1));
    const int64_t logits = head_chunk(c, shape.rollout_sequences, shape.device) *
                           kernels::head_rows(c.vocab_size, shape.device) *
                           static_cast<int64_t>(dtype_size(accumulate_dtype(dtype)));
    out.cache = KVCache::bytes(cache, cache_dtype(c, dtype));
    out.states = cache.count_states() * state_bytes(c, cache_dtype(c, dtype));
    out.sequences = shape.rollout_sequences;
    out.rollout =
        std::max(measure_forward(c, dtype, shape.rollout_prefill_tokens, shape.device), logits);
  }
  return out;
}

}  // namespace cohort
