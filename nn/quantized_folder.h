// Weights in 8 or 4 bits in a model's folder, as bitsandbytes and transformers write them, or to be
// quantised as they are read.
#pragma once

#include <set>
#include <string>

#include "data/safetensors.h"
#include "kernels/quantized_weight.h"
#include "text/json.h"

namespace cohort {

// The format that a config.json states in quantization_config: kNf4 (with double quantisation or
// without) or kInt8 of bitsandbytes; kModel without one. Throws InputError naming the method for
// others.
kernels::WeightFormat stored_format(const Json& config);

// The weight `name` [N, K], on the host, if the folder has it in 8 or 4 bits; else undefined. Adds
// the names of its tensors to `used`. Throws InputError naming the tensor that is missing or
// damaged, or a setting that is not supported: blocks of other sizes than 64, or rows that do not
// begin with one.
kernels::QuantizedWeight read_quantized(const SafetensorsFolder& folder, const std::string& name,
                                        const Shape& shape, std::set<std::string>& used);

}  // namespace cohort
