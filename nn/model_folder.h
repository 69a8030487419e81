// The folder of a model: config.json and safetensors, in Hugging Face's format (nn/families/) or in
// Cohort's own.
#pragma once

#include <string>
#include <vector>

#include "nn/transformer.h"

namespace cohort {

// True if the folder has a config.json and weights. Throws Error if the system cannot tell.
bool is_model_folder(const std::string& dir);

// DIR/config.json, resolved. Throws InputError naming the file and the field.
ModelConfig load_config(const std::string& dir);

// Reads DIR/STEM.safetensors or its shards into the model's parameters, converted to its dtype.
// Throws InputError for a tensor that is missing, unknown to the model, or of another shape.
void load_weights(Transformer& model, const std::string& dir, const std::string& stem = "model");

// Writes the weights under the names of the model's family and flushes them to disk. Returns the
// names of the files.
std::vector<std::string> save_weights(const Transformer& model, const std::string& dir,
                                      const std::string& stem = "model");
// Content of config.json: to_json() with the dtype of the weights.
Json saved_config(const Transformer& model);

}  // namespace cohort
