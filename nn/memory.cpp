#include "nn/memory.h"

#include <algorithm>

#include "core/allocator.h"

namespace cohort {
namespace {

// Sums tensors of `tokens` rows.
class Counter {
 public:
  Counter(int64_t tokens, DType dtype)
      : tokens_(tokens), size_(static_cast<int64_t>(dtype_size(dtype))) {}
  void add(int64_t columns, int64_t count = 1) {
    if (tokens_ * columns > 0)
      bytes_ += count * static_cast<int64_t>(
                            allocation_size(static_cast<size_t>(tokens_ * columns * size_)));
  }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t tokens_, size_, bytes_ = 0;
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
int64_t block_activations(const ModelConfig& c, int64_t tokens, DType dtype) {
  const Widths w(c);
  Counter n(tokens, dtype);
  const bool cheap = c.recompute == Recompute::kCheap;
  n.add(w.model, cheap ? 2 : 4);                 // input and output of both norms
  n.add(1, c.norm == NormType::kLayer ? 4 : 2);  // their statistics
  n.add(w.q, 2);                                 // rotated queries, attention output
  n.add(w.kv, 2);                                // rotated keys, values
  n.add(c.num_heads);                            // log-sum-exp
  if (c.qk_norm) {
    n.add(w.q);
    n.add(w.kv);
    n.add(c.num_heads);
    n.add(c.num_kv_heads);
  }
  n.add(w.ff, (c.mlp == MlpType::kSwiGlu ? 3 : 2) - cheap);
  return n.bytes();
}

// Gradients alive together in a block's backward: at its widest, around the MLP's activation.
int64_t block_workspace(const ModelConfig& c, int64_t tokens, DType dtype) {
  const Widths w(c);
  Counter mlp(tokens, dtype), attention(tokens, dtype);
  mlp.add(w.model);
  mlp.add(w.ff, c.mlp == MlpType::kSwiGlu ? 3 : 2);
  attention.add(w.model);
  attention.add(w.q, 2);
  attention.add(w.kv, 2);
  return std::max(mlp.bytes(), attention.bytes());
}

int64_t parameter_bytes(const ModelConfig& c, DType dtype) {
  return model_size(c).parameters * static_cast<int64_t>(dtype_size(dtype));
}

}  // namespace

MemoryEstimate estimate_memory(const ModelConfig& c, DType dtype, const MemoryShape& shape) {
  MemoryEstimate out;
  out.parameters = parameter_bytes(c, dtype);
  out.gradients = parameter_bytes(c, accumulate_dtype(dtype));
  out.optimizer = 2 * out.gradients;
  if (accumulate_dtype(dtype) != dtype) out.optimizer += out.gradients;  // masters
  if (shape.reference == MemoryShape::Reference::kHeld) out.reference = out.parameters;

  const int64_t tokens = shape.micro_batch_tokens;
  Counter ends(tokens, dtype);
  ends.add(c.d_model, 2);  // the last norm's input and output
  ends.add(1, 8);          // log-probs, entropy, statistics, weights
  const int64_t block = block_activations(c, tokens, dtype);
  if (c.recompute == Recompute::kBlock) {
    Counter inputs(tokens, dtype);
    inputs.add(c.d_model, c.num_layers);
    out.activations = inputs.bytes() + ends.bytes();
    out.workspace = block + block_workspace(c, tokens, dtype);
  } else {
    out.activations = c.num_layers * block + ends.bytes();
    out.workspace = block_workspace(c, tokens, dtype);
  }
  out.workspace =
      std::max(out.workspace, kernels::head_workspace_bytes(c.vocab_size, dtype, {}, shape.device));

  if (shape.rollout_sequences > 0) {
    const KVCacheConfig cache{.num_layers = c.num_layers,
                              .num_kv_heads = c.num_kv_heads,
                              .head_dim = c.head_dim,
                              .num_sequences = shape.rollout_sequences,
                              .max_length = shape.rollout_length};
    Counter forward(shape.rollout_prefill_tokens, dtype);
    forward.add(c.d_model, 3);
    forward.add(c.d_ff, c.mlp == MlpType::kSwiGlu ? 3 : 2);
    out.rollout = KVCache::bytes(cache, dtype) + forward.bytes();
  }
  return out;
}

}  // namespace cohort
