// Parameter and FLOP counts from a model's parameters.
#include "core/dry_run.h"
#include "nn/transformer.h"

namespace cohort {

ModelSize model_size(const ModelConfig& c) {
  const DryRun run({});
  const Transformer model(c, DType::kF32, std::nullopt);
  ModelSize size;
  for (const NamedParameter& p : model.parameters()) {
    if (p.role == ParameterRole::kAdapter) {
      size.adapters += p.value.numel();
      continue;
    }
    size.parameters += p.value.numel();
    if (p.use != ParameterUse::kMatmul) continue;
    size.matmul_parameters += p.value.numel();
    if (!p.name.starts_with("model.") || p.name.starts_with("model.embed_tokens"))
      size.head_parameters += p.value.numel();
  }
  return size;
}

double train_flops_per_token(const ModelConfig& c, double length, double targets) {
  // Mean number of keys that a query sees: half the length, less with a window, all in an encoder.
  double keys = 0, delta = 0;
  for (int i = 0; i < c.num_layers; ++i) {
    if (c.is_delta(i)) {  // a row reads and writes its matrix, and on average half of a chunk
      delta += static_cast<double>(c.delta.values()) *
               static_cast<double>(3 * c.delta.key_dim + 2 * kernels::kDeltaChunk);
      continue;
    }
    const auto window = static_cast<double>(c.window_of(i));
    keys += c.is_encoder()                    ? length
            : window == 0 || window >= length ? length / 2
                                              : window - window * window / (2 * length);
  }
  const ModelSize size = model_size(c);
  const double matmuls = static_cast<double>(size.matmul_parameters - size.head_parameters) +
                         targets * static_cast<double>(size.head_parameters);
  return (size.adapters > 0 ? 4.0 : 6.0) * matmuls + 6.0 * static_cast<double>(size.adapters) +
         12.0 * static_cast<double>(c.num_heads * c.head_dim) * keys + 6.0 * delta;
}

}  // namespace cohort
