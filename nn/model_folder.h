// The folder of a model: config.json and safetensors, as Hugging Face's (nn/families/) or as those
// of a model that Cohort has made.
#pragma once

#include <string>
#include <vector>

#include "nn/transformer.h"

namespace cohort {

// Whether a folder has what a model needs.
bool is_model_folder(const std::string& dir);

// DIR/config.json, resolved. Throws InputError naming the file and the field.
ModelConfig load_config(const std::string& dir);

// DIR/STEM.safetensors, or its shards, straight into the model's parameters, converted to its
// dtype. Throws InputError for a tensor that is missing, that the model does not know, or that has
// another shape.
void load_weights(Transformer& model, const std::string& dir, const std::string& stem = "model");

// Writes the weights under the names of the model's family and flushes them to disk. Returns the
// names of the files.
std::vector<std::string> save_weights(const Transformer& model, const std::string& dir,
                                      const std::string& stem = "model");
// What config.json says of the model: to_json(), with the dtype of the weights.
Json saved_config(const Transformer& model);

}  // namespace cohort
