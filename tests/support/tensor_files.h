// Tensors at once, where the library makes one at a time.
#pragma once

#include "data/safetensors.h"

namespace cohort {

inline NamedTensors tensors_of(const std::vector<TensorSource>& sources) {
  NamedTensors out;
  for (const TensorSource& source : sources) out.emplace_back(source.name, source.make());
  return out;
}

inline void write_safetensors(const std::string& path, const NamedTensors& tensors) {
  std::vector<TensorSource> sources;
  for (const auto& [name, tensor] : tensors)
    sources.push_back(
        {name, tensor.shape(), stored_name(tensor.dtype()), [&tensor = tensor] { return tensor; }});
  write_sources(path, sources);
}

}  // namespace cohort
