#include "nn/lora.h"

#include <algorithm>
#include <cctype>

#include "core/sizes.h"
#include "nn/families/family.h"

namespace cohort {
namespace {

constexpr int64_t kColumnAlignment = 64;
constexpr std::string_view kWeight = ".weight";

bool is_target(const std::string& name, const std::string& target) {
  return name == target || name.ends_with("." + target);
}

// Cohort's names of the linear layers of the blocks.
std::vector<std::string> linear_layers(const ModelConfig& config) {
  std::vector<std::string> out{"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                               "self_attn.o_proj", "mlp.up_proj",      "mlp.down_proj"};
  if (config.has_delta()) {
    if (config.num_layers < config.delta.full_every) out.erase(out.begin(), out.end() - 2);
    for (const char* name : {"out_proj", "in_proj_a", "in_proj_b", "in_proj_z", "in_proj_qkv"})
      out.insert(out.begin(), str("linear_attn.", name));
  }
  if (is_gated(config.mlp)) out.insert(out.end() - 2, "mlp.gate_proj");
  for (std::string& name : out) name.insert(0, "model.layers.*.");
  return out;
}

// A module of a layer, with the rows that it has there.
struct LayerModule {
  std::string name;
  Lora::Module rows;
};
std::vector<LayerModule> layer_modules(const AdapterTargets& lora,
                                       std::span<const LinearPart> parts) {
  std::vector<LayerModule> out;
  int64_t row = 0;
  for (const LinearPart& part : parts) {
    const auto [pattern, layer] = split_layer_name(part.name);
    for (const AdapterTarget& module : lora.modules) {
      if (std::ranges::count(module.parts, pattern) == 0) continue;
      const std::string name = layer_name(module.name, layer);
      if (out.empty() || out.back().name != name) out.push_back({name, {row, 0}});
      out.back().rows.rows += part.rows;
    }
    row += part.rows;
  }
  return out;
}

}  // namespace

LayerName split_layer_name(const std::string& name) {
  const auto is_digit = [](unsigned char c) { return std::isdigit(c) != 0; };
  for (size_t dot = name.find('.'); dot != name.npos; dot = name.find('.', dot + 1)) {
    const auto begin = name.begin() + static_cast<std::ptrdiff_t>(dot) + 1;
    const auto end = std::find_if_not(begin, name.end(), is_digit);
    if (begin == end || end == name.end() || *end != '.' || end - begin > 9) continue;
    return {std::string(name.begin(), begin) + "*" + std::string(end, name.end()),
            std::stoll(std::string(begin, end))};
  }
  return {name, -1};
}

std::string layer_name(std::string pattern, int64_t layer) {
  const size_t star = pattern.find('*');
  return star == pattern.npos ? pattern : pattern.replace(star, 1, std::to_string(layer));
}

bool has_module(const ModelConfig& config, const std::string& name, int64_t layer) {
  const bool is_delta = config.is_delta(static_cast<int>(layer));
  return name.find(is_delta ? ".self_attn." : ".linear_attn.") == name.npos;
}

std::vector<AdapterTarget> linear_modules(const ModelConfig& config) {
  std::vector<AdapterTarget> out;
  const std::vector<TensorRule>& rules = tensor_rules(config);
  for (const std::string& layer : linear_layers(config)) {
    const std::string weight = str(layer, kWeight);
    const auto rule = std::ranges::find_if(
        rules, [&](const TensorRule& r) { return std::ranges::count(r.parameters, weight) > 0; });
    std::string name = rule == rules.end() ? weight : rule->stored;
    name.resize(name.size() - kWeight.size());
    if (out.empty() || out.back().name != name) out.push_back({name, {}});
    out.back().parts.push_back(layer);
  }
  return out;
}

AdapterTargets::AdapterTargets(const ModelConfig& model) : config(model.lora) {
  if (config.rank == 0) return;
  modules = linear_modules(model);
  std::string known;
  for (const AdapterTarget& module : modules)
    known += str(known.empty() ? "" : ", ", module.name.substr(module.name.find('*') + 2));
  for (const std::string& target : config.targets)
    if (std::ranges::none_of(modules, [&](const auto& m) { return is_target(m.name, target); }))
      throw InputError(str("lora.targets: '", target,
                           "' is no linear layer of this model's blocks; known: ", known,
                           "; hint: without lora.targets all have adapters"));
  if (config.targets.empty()) return;
  std::erase_if(modules, [&](const AdapterTarget& m) {
    return std::ranges::none_of(config.targets,
                                [&](const auto& t) { return is_target(m.name, t); });
  });
}

int64_t lora_columns(const AdapterTargets& adapters, std::span<const LinearPart> parts) {
  const auto modules = static_cast<int64_t>(layer_modules(adapters, parts).size());
  return round_up(modules * adapters.config.rank, kColumnAlignment) * adapters.config.slots;
}

Lora add_lora(ParameterSet& set, const AdapterTargets& adapters, std::span<const LinearPart> parts,
              int64_t in) {
  const std::vector<LayerModule> modules = layer_modules(adapters, parts);
  if (modules.empty()) return {};
  const int64_t rank = adapters.config.rank;
  int64_t rows = 0;
  for (const LayerModule& module : modules) rows += module.rows.rows;
  const auto count = static_cast<int64_t>(modules.size());
  const ParameterLeaf a =
      set.add_leaf({.name = modules[0].name + ".lora_A",
                    .shape = {count * rank, in},
                    .use = ParameterUse::kMatmul,
                    .init = 1 / std::sqrt(static_cast<double>(in)),
                    .role = ParameterRole::kAdapter,
                    .leaf_rows = round_up(count * rank, kColumnAlignment) * adapters.config.slots});
  const ParameterLeaf b = set.add_leaf({.name = modules[0].name + ".lora_B",
                                        .shape = {rows, rank},
                                        .use = ParameterUse::kMatmul,
                                        .role = ParameterRole::kAdapter});
  Lora lora{.a = a.variable,
            .b = b.variable,
            .modules = {},
            .scale = adapters.config.scale(),
            .slots = adapters.config.slots};
  int64_t row = 0;
  for (const auto& [name, module] : modules) {
    const auto first = static_cast<int64_t>(lora.modules.size()) * rank;
    set.add_rows(a, name + ".lora_A.weight", first, rank);
    set.add_rows(b, name + ".lora_B.weight", row, module.rows);
    row += module.rows;
    lora.modules.push_back(module);
  }
  return lora;
}

void write_lora_columns(const Lora& lora, const LayerWeight& weight, const Tensor& workspace) {
  if (!lora.defined()) return;
  const Tensor columns = weight.adapter_columns(), b = lora.b.value();
  const int64_t rank = lora.rank();
  Tensor scaled = workspace.narrow(0, 0, b.numel()).reshape(b.shape());
  kernels::scale({.y = scaled, .x = b, .factor = lora.scale});
  int64_t row = 0, column = 0;
  for (const Lora::Module& module : lora.modules) {
    columns.narrow(0, module.row, module.rows)
        .narrow(1, column, rank)
        .copy_(scaled.narrow(0, row, module.rows));
    row += module.rows;
    column += rank;
  }
}

size_t write_adapter_slot(const Lora& lora, const LayerWeight& weight, int64_t slot,
                          std::span<const Tensor> values, double scale) {
  const int64_t rank = lora.rank(), width = lora.columns() / lora.slots;
  const Tensor rows = lora.a.value().with_padding().narrow(0, slot * width, width),
               columns = weight.adapter_columns().narrow(1, slot * width, width);
  int64_t at = 0;
  size_t next = 0;
  for (const Lora::Module& module : lora.modules) {
    rows.narrow(0, at, rank).copy_(values[next++]);
    Tensor scaled = Tensor::empty_like(values[next]);
    kernels::scale({.y = scaled, .x = values[next++], .factor = scale});
    columns.narrow(0, module.row, module.rows).narrow(1, at, rank).copy_(scaled);
    at += rank;
  }
  return next;
}

}  // namespace cohort
