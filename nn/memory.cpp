#include "nn/memory.h"

#include <algorithm>

#include "core/allocator.h"

namespace cohort {
namespace {

// Sums tensors of `tokens` rows.
class Counter {
 public:
  Counter(int64_t tokens, DType dtype, Device device)
      : tokens_(tokens), dtype_(dtype), device_(device) {}
  void add(int64_t columns, int64_t count = 1) { add(columns, count, dtype_); }
  // Statistics and the like, of the dtype of sums.
  void add_accumulated(int64_t columns, int64_t count = 1) {
    add(columns, count, accumulate_dtype(dtype_));
  }
  int64_t bytes() const { return bytes_; }

 private:
  void add(int64_t columns, int64_t count, DType dtype) {
    const size_t bytes = static_cast<size_t>(tokens_ * columns) * dtype_size(dtype);
    if (bytes > 0) bytes_ += count * static_cast<int64_t>(allocation_size(bytes, device_));
  }
  const int64_t tokens_;
  const DType dtype_;
  const Device device_;
  int64_t bytes_ = 0;
};

struct Widths {
  explicit Widths(const ModelConfig& c)
      : model(c.d_model),
        q(c.num_heads * c.head_dim),
        kv(c.num_kv_heads * c.head_dim),
        ff(c.d_ff) {}
  int64_t model, q, kv, ff;
};

// What one block's closures capture.
int64_t block_activations(const ModelConfig& c, Counter n) {
  const Widths w(c);
  const bool cheap = c.recompute == Recompute::kCheap;
  n.add(w.model, cheap ? 2 : 4);                             // input and output of both norms
  n.add_accumulated(1, c.norm == NormType::kLayer ? 4 : 2);  // their statistics
  n.add(w.q, 2);                                             // rotated queries, attention output
  n.add(w.kv, 2);                                            // rotated keys, values
  n.add_accumulated(c.num_heads);                            // log-sum-exp
  if (c.qk_norm || c.qk_norm_whole) {
    n.add(w.q);
    n.add(w.kv);
    n.add_accumulated(c.qk_norm ? c.num_heads + c.num_kv_heads : 2);
  }
  n.add(w.ff, (is_gated(c.mlp) ? 3 : 2) - cheap);
  return n.bytes();
}

// Gradients alive together in a block's backward: most of them around the MLP's activation.
int64_t block_workspace(const ModelConfig& c, Counter mlp) {
  const Widths w(c);
  Counter attention = mlp;
  mlp.add(w.model);
  mlp.add(w.ff, is_gated(c.mlp) ? 3 : 2);
  attention.add(w.model);
  attention.add(w.q, 2);
  attention.add(w.kv, 2);
  return std::max(mlp.bytes(), attention.bytes());
}

int64_t parameter_bytes(const ModelConfig& c, DType dtype) {
  return model_size(c).parameters * static_cast<int64_t>(dtype_size(dtype));
}

// A bound of the activations, the workspace and the cache, in a type that does not overflow.
void check_countable(const ModelConfig& c, const MemoryShape& shape) {
  const Widths w(c);
  const auto columns = static_cast<double>(5 * w.model + 8 * (w.q + w.kv) + 4 * w.ff + 64);
  const double tokens = static_cast<double>(shape.micro_batch_tokens) +
                        static_cast<double>(shape.rollout_prefill_tokens) +
                        static_cast<double>(shape.rollout_sequences + shape.idle_sequences) *
                            static_cast<double>(shape.rollout_length);
  // 8 bytes, twice that where an allocation is rounded up.
  const double bytes =
      16 * tokens *
      (columns * static_cast<double>(c.num_layers + 2) + static_cast<double>(c.vocab_size));
  if (bytes > 0x1p61)
    throw InputError(str("memory: this model and batch would take about ", bytes,
                         " bytes; hint: smaller sizes under model, or a smaller "
                         "micro_batch_tokens, max_concurrent or max_completion_length"));
}

}  // namespace

MemoryEstimate estimate_memory(const ModelConfig& c, DType dtype, const MemoryShape& shape) {
  check_countable(c, shape);
  MemoryEstimate out;
  out.parameters = parameter_bytes(c, dtype);
  out.gradients = parameter_bytes(c, accumulate_dtype(dtype));
  out.optimizer = 2 * out.gradients;
  if (accumulate_dtype(dtype) != dtype) out.optimizer += out.gradients;  // masters
  if (shape.reference == MemoryShape::Reference::kHeld) out.reference = out.parameters;

  const int64_t tokens = shape.micro_batch_tokens;
  const Counter none(tokens, dtype, shape.device);
  Counter ends = none;
  ends.add(c.d_model, 2);      // the last norm's input and output
  ends.add_accumulated(1, 8);  // log-probs, entropy, statistics, weights
  const int64_t block = block_activations(c, none);
  if (c.recompute == Recompute::kBlock) {
    Counter inputs = none;
    inputs.add(c.d_model, c.num_layers);
    out.activations = inputs.bytes() + ends.bytes();
    out.workspace = block + block_workspace(c, none);
  } else {
    out.activations = c.num_layers * block + ends.bytes();
    out.workspace = block_workspace(c, none);
  }
  const int64_t chunk = std::min(tokens, kernels::head_chunk_tokens(c.vocab_size, 0, shape.device));
  out.workspace = std::max(
      out.workspace,
      kernels::head_workspace_bytes(c.vocab_size, dtype, {.chunk_tokens = chunk}, shape.device));

  if (shape.rollout_sequences > 0) {
    const KVCacheConfig cache{.num_layers = c.num_layers,
                              .num_kv_heads = c.num_kv_heads,
                              .head_dim = c.head_dim,
                              .num_sequences = shape.rollout_sequences + shape.idle_sequences,
                              .max_length = shape.rollout_length};
    Counter forward(shape.rollout_prefill_tokens, dtype, shape.device);
    forward.add(c.d_model, 3);
    forward.add(c.d_ff, is_gated(c.mlp) ? 3 : 2);
    const int64_t drawn = std::min(shape.rollout_sequences,
                                   kernels::head_chunk_tokens(c.vocab_size, 0, shape.device));
    Counter logits(drawn, dtype, shape.device);
    logits.add_accumulated(c.vocab_size);
    out.rollout = KVCache::bytes(cache, dtype) + std::max(forward.bytes(), logits.bytes());
  }
  return out;
}

}  // namespace cohort
