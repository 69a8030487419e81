#include "nn/merge.h"

#include <cmath>
#include <map>
#include <optional>

#include "data/safetensors.h"
#include "kernels/elementwise.h"
#include "kernels/matmul.h"
#include "nn/lora.h"
#include "nn/model_folder.h"

namespace cohort {
namespace {

// Adds the weights of one matrix that differ.
void count_moved(const Tensor& before, const Tensor& after, MergeChange& change, double& sum) {
  dispatch_float(before.dtype(), "merge", [&]<class T>() {
    const T *a = before.data<T>(), *b = after.data<T>();
    for (int64_t i = 0; i < before.numel(); ++i) {
      const double difference = static_cast<double>(b[i]) - static_cast<double>(a[i]);
      if (difference == 0) continue;
      ++change.moved;
      sum += std::abs(difference);
    }
  });
  change.weights += before.numel();
}

}  // namespace

MergeChange merge_adapters(Transformer& model, const std::string& type) {
  COHORT_CHECK(model.device().is_cpu() && model.dtype() != DType::kBF16,
               "[merge] expected a model on the host, in f32 or f64");
  const ModelConfig& config = model.config();
  std::map<std::string, Tensor> values;
  for (const NamedParameter& p : model.parameters()) values.emplace(p.name, p.value);
  MergeChange change;
  double sum = 0;
  for (const LoraModule& module : LoraModules(config).modules)
    for (int64_t layer = 0; layer < config.num_layers; ++layer) {
      const std::string name = layer_name(module.name, layer);
      const Tensor a = values.at(name + ".lora_A.weight").transpose(0, 1).contiguous();
      Tensor& b = values.at(name + ".lora_B.weight");
      Tensor scaled = Tensor::empty_like(b);
      kernels::scale({.y = scaled, .x = b.contiguous(), .factor = config.lora.scale()});
      int64_t row = 0;
      for (const std::string& part : module.parts) {
        const std::string weight = layer_name(part, layer) + ".weight";
        Tensor& w = values.at(weight);
        const Tensor rows = scaled.narrow(0, row, w.dim(0)).contiguous(), old = w.contiguous();
        row += w.dim(0);
        Tensor merged = Tensor::empty_like(old);
        kernels::linear_forward({.y = merged, .x = rows, .w = a, .bias = {}});
        kernels::scale({.y = merged, .x = old, .factor = 1, .mode = kernels::Grad::kAccumulate});
        merged = stored_values(merged, type, weight);
        count_moved(stored_values(old, type, weight), merged, change, sum);
        w.copy_(merged);
      }
      b.zero_();
    }
  model.write_lora_columns();
  if (change.moved > 0) change.mean = sum / static_cast<double>(change.moved);
  return change;
}

KeptChange round_to(Transformer& model, const std::string& type, const std::string& start) {
  MergeChange changed, kept;
  double unused = 0;
  if (!start.empty()) {
    const SafetensorsFolder folder(start, "model");
    for (const TensorSource& weight : weight_sources(model, type)) {
      const auto [file, name] = find_weight(folder, weight.name);
      if (file == nullptr || file->shape(name) != weight.shape) continue;
      const Tensor after = weight.make(), before = file->read(name).to(after.dtype());
      count_moved(before, after, changed, unused);
      count_moved(stored_values(before, type, name), stored_values(after, type, name), kept,
                  unused);
    }
  }
  for (const NamedParameter& p : model.parameters()) {
    Tensor value = p.value;
    value.copy_(stored_values(value.contiguous(), type, p.name));
  }
  return {changed.moved, kept.moved};
}

}  // namespace cohort
