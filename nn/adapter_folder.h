// The folder of an adapter (LoRA) in PEFT's format: adapter_config.json, and
// adapter_model.safetensors with "base_model.model." + the module as the model's family stores it +
// ".lora_A.weight" [rank, in] and ".lora_B.weight" [out, rank].
#pragma once

#include <string>
#include <vector>

#include "data/safetensors.h"
#include "nn/transformer.h"

namespace cohort {

// True if the folder has an adapter_config.json. Throws Error if the system cannot tell.
bool is_adapter_folder(const std::string& dir);

struct AdapterConfig {
  LoraConfig lora;                   // targets: the modules' names without their blocks
  std::string base;                  // base_model_name_or_path; empty: not known
  std::vector<std::string> modules;  // with adapters: "model.layers.*.self_attn.q_proj", sorted
  int64_t num_layers = 0;
};
// Reads adapter_config.json and the header of adapter_model.safetensors, whose names say which
// modules have adapters. Throws InputError naming the file and the field or the tensor for what is
// malformed or changes the maths in a way that is not supported: DoRA, ranks that differ, trained
// embeddings or biases, and all fields that are not known.
AdapterConfig load_adapter_config(const std::string& dir);

// `base`, resolved, with the adapter of `dir`; lora.targets is empty if it has all linear layers.
// Throws InputError naming the file and the tensor if the adapter does not fit the base model.
ModelConfig with_adapter(ModelConfig base, const AdapterConfig& adapter, const std::string& dir);

// The adapters in a file for a model with config.lora, under PEFT's names, in the order of
// Transformer::adapters(), on the host, converted to `dtype`. Throws InputError naming the tensor
// that is missing, unknown, of another shape, or not finite.
NamedTensors read_adapter_tensors(const std::string& path, const ModelConfig& config, DType dtype);
// Their values in the model's dtype, on its device, for Transformer::set_adapters().
std::vector<Tensor> load_adapter_tensors(const Transformer& model, const std::string& path);
// Reads DIR/adapter_model.safetensors into the model's adapters, or into those of a slot, with its
// scale. Throws InputError as read_adapter_tensors() does.
void load_adapter(Transformer& model, const std::string& dir, int64_t slot = 0, double scale = 0);

// Writes Transformer::adapters() of the model, or other values of them, under PEFT's names.
void save_adapter_tensors(const Transformer& model, const std::vector<Tensor>& values,
                          const std::string& path);
// Writes the folder's two files for an adapter of a model with config.lora, and flushes them to
// disk. `base`: path of the base model, or its name on the Hugging Face Hub. Returns the files'
// names.
std::vector<std::string> write_adapter(const ModelConfig& config,
                                       const std::vector<TensorSource>& tensors,
                                       const std::string& dir, const std::string& base);
// Likewise for the adapters of `model`, as `dtype` of export_model(); empty: the model's.
std::vector<std::string> save_adapter(const Transformer& model, const std::string& dir,
                                      const std::string& base, const std::string& dtype = "");

// The end of an error message about a base model that is named as quantized ("-bnb-4bit", "-GPTQ",
// "-AWQ"): the way to the 16-bit model; "" for other names.
std::string quantized_base_hint(const std::string& base);

}  // namespace cohort
