// A base model with several adapters (LoRA) at once.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "job/checkpoint.h"

namespace cohort {

// The whole model in the folder `base` with the adapters of up to kMaxAdapters folders side by
// side, for sampling. Without `format` the base is as in their precision.json or the folder's.
// Throws InputError if the adapters have other ranks, modules or base formats than the first one,
// if one has rounded keys, whose scales depend on it, or if another base was recorded.
inline constexpr size_t kMaxAdapters = 8;
LoadedModel load_with_adapters(const std::string& base, std::span<const std::string> adapters,
                               DType dtype, Device device,
                               std::optional<kernels::WeightFormat> format);

}  // namespace cohort
