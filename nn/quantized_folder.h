// Weights in 8 or 4 bits in a model's folder, as bitsandbytes and transformers write them, or to be
// quantised as they are read.
#pragma once

#include <set>
#include <string>

#include "data/safetensors.h"
#include "nn/model_config.h"

namespace cohort {

// The configuration's stored_format if the folder has all linear layers of the blocks in it; kModel
// if it has some as numbers, and for encoders.
kernels::WeightFormat whole_format(const std::string& dir, const ModelConfig& config);

// The weight `name` [N, K], on the host, if the folder has it in 8 or 4 bits; else undefined. Adds
// the names of its tensors to `used`. Throws InputError naming the tensor that is missing or
// damaged, or a setting that is not supported: blocks of other sizes than 64, rows that do not
// begin with one, int8 in tiles.
kernels::QuantizedWeight read_quantized(const SafetensorsFolder& folder, const std::string& name,
                                        const Shape& shape, std::set<std::string>& used);

}  // namespace cohort
