// The safetensors format: u64 header length, JSON header, raw little-endian tensors. Reading checks
// every offset, size and dtype before it touches data.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/tensor.h"

namespace cohort {

using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

// Writes in the given order and flushes to disk (fsync). Throws Error with the path and the
// system's reason.
void write_safetensors(const std::string& path, const NamedTensors& tensors);

// A file open for reading (memory-mapped). Throws InputError("PATH: ..."): missing, truncated,
// overlapping or out-of-range tensors, unknown dtype, malformed header.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::vector<std::string>& names() const;
  bool contains(const std::string& name) const;
  Shape shape(const std::string& name) const;
  DType dtype(const std::string& name) const;
  // A copy. Throws InputError naming the file and the known names if there is no such tensor.
  Tensor read(const std::string& name) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cohort
