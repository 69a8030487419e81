// Adapters of a model's linear layers (LoRA, Hu et al. 2021): the layers that have one, and their
// parameters in the model's set.
#pragma once

#include <string>
#include <vector>

#include "autograd/lora.h"
#include "nn/model_config.h"
#include "nn/parameter_set.h"

namespace cohort {

// A linear layer as the model's family stores it, which has one adapter: the rows of several of
// Cohort's if the family stores those in one tensor (Phi-3, GPT-2). '*' stands for the block's
// number.
struct AdapterTarget {
  std::string name;                // "model.layers.*.self_attn.q_proj"
  std::vector<std::string> parts;  // Cohort's names, likewise
};
// All linear layers of the blocks, in order. The configuration must be resolved.
std::vector<AdapterTarget> linear_modules(const ModelConfig& config);
// True if a block has such a layer.
bool has_module(const ModelConfig& config, const std::string& name, int64_t layer);
// The linear layers with an adapter: the name is one of lora.targets, or ends with a dot and one;
// none if the rank is 0. The constructor throws InputError for a target that names none.
struct AdapterTargets {
  explicit AdapterTargets(const ModelConfig& model);
  LoraConfig config;
  std::vector<AdapterTarget> modules;
};

// A named part of a linear layer, such as its queries: rows of the layer's weight.
struct LinearPart {
  std::string name;  // "model.layers.0.self_attn.q_proj"
  int64_t rows = 0;
};
// Columns of s B, and of h: the ranks of the adapters of a layer of these parts side by side,
// padded to a multiple of 64, which keeps matmuls aligned; 0 if it has none.
int64_t lora_columns(const AdapterTargets& adapters, std::span<const LinearPart> parts);
// Adds the adapters of such a layer with `in` inputs as NAME.lora_A.weight [rank, in], uniform in
// +-1 / sqrt(in) (PEFT's initial values), and NAME.lora_B.weight [out, rank], zeros. Undefined if
// it has none.
Lora add_lora(ParameterSet& set, const AdapterTargets& adapters, std::span<const LinearPart> parts,
              int64_t in);
// Writes s B, the adapter's columns of a weight. To be called whenever B has changed. The workspace
// has at least as many elements as B, in its dtype, so that nothing is allocated.
void write_lora_columns(const Lora& lora, const LayerWeight& weight, const Tensor& workspace);

// Writes the A and B of each module, from the first of `values` on, as the adapter `slot` of a
// layer; returns how many they were.
size_t write_adapter_slot(const Lora& lora, const LayerWeight& weight, int64_t slot,
                          std::span<const Tensor> values, double scale);

// "model.layers.12.mlp.up_proj" -> "model.layers.*.mlp.up_proj" and 12; -1 if there is no number.
struct LayerName {
  std::string pattern;
  int64_t layer = -1;
};
LayerName split_layer_name(const std::string& name);
// The pattern with the number in place of '*'.
std::string layer_name(std::string pattern, int64_t layer);

}  // namespace cohort
