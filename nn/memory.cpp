#include "nn/memory.h"

#include <algorithm>

#include "core/dry_run.h"

namespace cohort {
namespace {

// A bound of what the tensors of a step and the cache take, in a type that does not overflow.
void check_countable(const ModelConfig& c, const MemoryShape& shape) {
  const int64_t heads = (c.num_heads + c.num_kv_heads) * c.head_dim;
  const auto columns = static_cast<double>(8 * (c.d_model + heads) + 4 * c.d_ff + 64);
  const double tokens =
      static_cast<double>(shape.micro_batch_tokens) +
      static_cast<double>(shape.rollout_prefill_tokens) +
      static_cast<double>(shape.rollout_sequences) * static_cast<double>(shape.rollout_length);
  // 8 bytes, twice that where an allocation is rounded up.
  const double bytes =
      16 * tokens *
      (columns * static_cast<double>(c.num_layers + 2) + static_cast<double>(c.vocab_size));
  if (bytes > 0x1p61)
    throw InputError(str("memory: this model and batch would take about ", bytes,
                         " bytes; hint: smaller sizes under model, or a smaller "
                         "micro_batch_tokens, max_concurrent or max_completion_length"));
}

// A model whose tensors have no elements, and a batch for it.
struct DryModel {
  DryModel(const ModelConfig& config, DType dtype, int64_t tokens, Device device)
      : run(device), model(config, dtype, std::nullopt, device) {
    for (const Variable& leaf : model.leaves()) leaf.grad();
    for (Tensor* t : {&batch.tokens, &batch.positions, &batch.learned, &batch.targets})
      *t = Tensor::empty({tokens}, DType::kI32, device);
    batch.sequences = Tensor::empty({tokens}, DType::kI64, device);
    batch.cu_seqlens = Tensor::empty({2}, DType::kI32, device);
    before = run.stats().live_bytes;
  }
  int64_t live() const { return run.stats().live_bytes - before; }
  int64_t peak() const { return run.stats().peak_bytes - before; }

  DryRun run;
  Transformer model;
  PackedBatch batch;
  int64_t before = 0;
};

struct StepMemory {
  int64_t kept = 0;       // by the tape, for the backward
  int64_t workspace = 0;  // beside it
};

StepMemory measure_step(const ModelConfig& config, DType dtype, int64_t tokens, Device device) {
  const DryModel dry(config, dtype, tokens, device);
  const Tensor weights = Tensor::empty({tokens}, accumulate_dtype(dtype), device);
  const Variable loss = cross_entropy(dry.model.forward_learned(dry.batch, {.mode = Mode::kTrain}),
                                      dry.model.head(), dry.batch.targets, weights);
  const int64_t kept = dry.live();
  backward(loss);
  return {kept, dry.peak() - kept};
}

int64_t measure_forward(const ModelConfig& config, DType dtype, int64_t tokens, Device device) {
  const DryModel dry(config, dtype, tokens, device);
  NoGradGuard no_grad;
  dry.model.forward(dry.batch);
  return dry.peak();
}

// Tokens whose logits a head holds at a time.
int64_t head_chunk(const ModelConfig& c, int64_t tokens, Device device) {
  return std::min(tokens, kernels::head_chunk_tokens(c.vocab_size, 0, device));
}

}  // namespace

MemoryEstimate estimate_memory(const ModelConfig& c, DType dtype, const MemoryShape& shape) {
  check_countable(c, shape);
  const int64_t parameters = model_size(c).parameters;
  const DType sums = accumulate_dtype(dtype);
  MemoryEstimate out;
  out.parameters = parameters * static_cast<int64_t>(dtype_size(dtype));
  out.gradients = parameters * static_cast<int64_t>(dtype_size(sums));
  out.optimizer = (sums == dtype ? 2 : 3) * out.gradients;  // moments, masters
  if (shape.reference == MemoryShape::Reference::kHeld) out.reference = out.parameters;

  if (const int64_t tokens = shape.micro_batch_tokens; tokens > 0) {
    const StepMemory step = measure_step(c, dtype, tokens, shape.device);
    out.activations = step.kept;
    out.workspace = std::max(step.workspace, kernels::head_workspace_bytes(
                                                 tokens, c.vocab_size, dtype, {}, shape.device));
  }
  if (shape.rollout_sequences > 0) {
    const KVCacheConfig cache{.num_layers = c.num_layers,
                              .num_kv_heads = c.num_kv_heads,
                              .head_dim = c.head_dim,
                              .num_sequences = shape.rollout_sequences,
                              .max_length = shape.rollout_length};
    const int64_t logits = head_chunk(c, shape.rollout_sequences, shape.device) * c.vocab_size *
                           static_cast<int64_t>(dtype_size(sums));
    out.cache = KVCache::bytes(cache, dtype);
    out.rollout =
        std::max(measure_forward(c, dtype, shape.rollout_prefill_tokens, shape.device), logits);
  }
  return out;
}

}  // namespace cohort
