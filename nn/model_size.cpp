// Parameter and FLOP counts from the descriptions of a model's parameters.
#include "nn/transformer.h"

namespace cohort {

ModelSize model_size(const ModelConfig& c) {
  ModelSize size;
  for (const ParameterSpec& spec : describe_parameters(c)) {
    size.parameters += spec.shape.numel();
    if (spec.use == ParameterSpec::Use::kMatmul) size.matmul_parameters += spec.shape.numel();
  }
  return size;
}

double train_flops_per_token(const ModelConfig& c, double length) {
  // Mean number of keys that a query sees: half the length, or less with a window.
  double keys = 0;
  for (int i = 0; i < c.num_layers; ++i) {
    const auto window = static_cast<double>(c.window_of(i));
    keys += window == 0 || window >= length ? length / 2 : window - window * window / (2 * length);
  }
  return 6.0 * static_cast<double>(model_size(c).matmul_parameters) +
         12.0 * static_cast<double>(c.num_heads * c.head_dim) * keys;
}

}  // namespace cohort
