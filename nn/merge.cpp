#include "nn/merge.h"

#include <cmath>
#include <map>

#include "data/safetensors.h"
#include "kernels/elementwise.h"
#include "kernels/matmul.h"
#include "nn/lora.h"
#include "nn/model_folder.h"

namespace cohort {
namespace {

// The number of elements that differ, and the sum of their differences' magnitudes.
std::pair<int64_t, double> difference(const Tensor& before, const Tensor& after) {
  int64_t moved = 0;
  double sum = 0;
  dispatch_float(before.dtype(), "merge", [&]<class T>() {
    const T *a = before.data<T>(), *b = after.data<T>();
    for (int64_t i = 0; i < before.numel(); ++i) {
      moved += a[i] != b[i] ? 1 : 0;
      sum += std::abs(static_cast<double>(b[i]) - static_cast<double>(a[i]));
    }
  });
  return {moved, sum};
}

}  // namespace

std::unique_ptr<Transformer> expanded(const Transformer& model) {
  ModelConfig config = model.config();
  config.precision.base = kernels::WeightFormat::kModel;
  auto out = std::make_unique<Transformer>(config, model.dtype(), std::nullopt, model.device());
  for (size_t i = 0; i < model.parameters().size(); ++i) {
    const NamedParameter& p = model.parameters()[i];
    Tensor value = out->parameters()[i].value;
    if (p.quantized.defined())
      kernels::dequantize_weight({value, p.quantized});
    else
      value.copy_(p.value);
  }
  out->update_derived();
  return out;
}

MergeChange merge_adapters(Transformer& model, const std::string& type) {
  COHORT_CHECK(model.device().is_cpu() && model.dtype() != DType::kBF16,
               "[merge] expected a model on the host, in f32 or f64");
  const ModelConfig& config = model.config();
  std::map<std::string, Tensor> values;
  for (const NamedParameter& p : model.parameters()) values.emplace(p.name, p.value);
  MergeChange change;
  double sum = 0;
  for (const AdapterTarget& module : AdapterTargets(config).modules)
    for (int64_t layer = 0; layer < config.num_layers; ++layer) {
      const std::string name = layer_name(module.name, layer);
      if (!has_module(config, name, layer)) continue;
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
        const auto [moved, size] = difference(stored_values(old, type, weight), merged);
        change.weights += merged.numel();
        change.moved += moved;
        sum += size;
        w.copy_(merged);
      }
      b.zero_();
    }
  model.update_derived();
  if (change.moved > 0) change.mean = sum / static_cast<double>(change.moved);
  return change;
}

KeptChange kept_change(const Transformer& model, const std::string& type,
                       const std::string& start) {
  KeptChange out;
  const SafetensorsFolder folder(start, "model");
  for (const TensorSource& weight : weight_sources(model, type)) {
    const auto [file, name] = find_weight(folder, weight.name);
    if (file == nullptr || file->shape(name) != weight.shape || !is_float(file->dtype(name)))
      continue;
    const Tensor after = weight.make(), before = file->read(name).to(after.dtype());
    out.changed += difference(before, after).first;
    out.kept += difference(stored_values(before, weight.type, name),
                           stored_values(after, weight.type, name))
                    .first;
  }
  return out;
}

void round_weights(Transformer& model, const std::string& type) {
  for (const NamedParameter& p : model.parameters()) {
    Tensor value = p.value;
    value.copy_(stored_values(value.contiguous(), type_in_files(p, type), p.name));
  }
  model.update_derived();
}

}  // namespace cohort
