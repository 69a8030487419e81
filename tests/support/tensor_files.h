// Tensors at once, where the library makes one at a time.
#pragma once

#include <cstdio>
#include <filesystem>

#include "data/safetensors.h"

namespace cohort {

namespace test {
// FNV-1a of a tensor's bytes, 64 bits in hexadecimal digits.
inline std::string fnv(const Tensor& t) {
  const Tensor whole = t.contiguous();
  uint64_t hash = 0xcbf29ce484222325u;
  for (int64_t i = 0; i < whole.nbytes(); ++i)
    hash = (hash ^ static_cast<const uint8_t*>(whole.raw())[i]) * 0x100000001b3u;
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
  return text;
}
}  // namespace test

inline NamedTensors tensors_of(const std::vector<TensorSource>& sources) {
  NamedTensors out;
  for (const TensorSource& source : sources) out.emplace_back(source.name, source.make());
  return out;
}

// PATH.safetensors, or its shards.
inline SafetensorsFolder safetensors_at(const std::string& path) {
  const std::filesystem::path file(path);
  return {file.parent_path().string(), file.stem().string()};
}

// The numbers of all tensors of a file, in their order, as one tensor.
inline Tensor all_values(const std::string& path) {
  const SafetensorsFile file(path);
  std::vector<double> out;
  for (const std::string& name : file.names()) {
    const auto part = file.read(name).to_vector<double>();
    out.insert(out.end(), part.begin(), part.end());
  }
  return Tensor::from(out);
}

inline void write_safetensors(const std::string& path, const NamedTensors& tensors) {
  std::vector<TensorSource> sources;
  for (const auto& [name, tensor] : tensors)
    sources.push_back(
        {name, tensor.shape(), stored_name(tensor.dtype()), [&tensor = tensor] { return tensor; }});
  write_sources(path, sources);
}

}  // namespace cohort
