// Merges adapters (LoRA) into the weights of their base model.
#pragma once

#include <memory>
#include <string>

#include "nn/transformer.h"

namespace cohort {

// The model with its weights in 8 or 4 bits as numbers in its dtype.
std::unique_ptr<Transformer> expanded(const Transformer& model);

// Counts of the weights that a merge has changed.
struct MergeChange {
  int64_t weights = 0;  // the weights of the layers that have an adapter
  int64_t moved = 0;    // the weights whose stored value is another one
  double mean = 0;      // mean |change| of the stored values of those
};
// Replaces the weight W of each module by W + s B A: a sum in the model's dtype, f32 or f64, which
// is rounded once, to `type` of safetensors ("BF16"). B becomes 0. For models on the host. Throws
// InputError naming the weight as stored_values() does.
MergeChange merge_adapters(Transformer& model, const std::string& type);

// Counts of the weights that training has changed, and of those that still differ once rounded.
struct KeptChange {
  int64_t changed = 0, kept = 0;
};
// Compares the model with that in the folder `start`, with which training began, before and after
// both are rounded to `type`. For models on the host. Throws InputError as stored_values() does.
KeptChange kept_change(const Transformer& model, const std::string& type, const std::string& start);
// Rounds all weights to `type`. Throws InputError naming the weight as stored_values() does.
void round_weights(Transformer& model, const std::string& type);

}  // namespace cohort
