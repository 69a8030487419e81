// The safetensors format: u64 header length, JSON header, raw little-endian tensors. Reading checks
// every offset, size and dtype before it touches data.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/tensor.h"

namespace cohort {

class Json;

using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

// Writes in the given order and flushes to disk (fsync). Throws Error with the path and the
// system's reason.
void write_safetensors(const std::string& path, const NamedTensors& tensors);

// A file open for reading (memory-mapped). Throws InputError("PATH: ..."): missing, truncated,
// overlapping or out-of-range tensors, unknown dtype, malformed header.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path);

  const std::vector<std::string>& names() const { return names_; }
  bool contains(const std::string& name) const { return entries_.contains(name); }
  Shape shape(const std::string& name) const { return find(name).shape; }
  DType dtype(const std::string& name) const { return find(name).dtype; }
  // A copy. Throws InputError naming the file and the known names if there is no such tensor.
  Tensor read(const std::string& name) const;

 private:
  struct Entry {
    DType dtype;
    Shape shape;
    uint64_t begin, end;  // within the data, which follows the header
  };
  struct Map {  // the whole file
    void* begin = nullptr;
    size_t size = 0;
    Map() = default;
    Map(const Map&) = delete;
    Map& operator=(const Map&) = delete;
    ~Map();
  };

  [[noreturn]] void fail(const std::string& what) const { throw InputError(path_ + ": " + what); }
  void open();
  void read_header();
  void check_metadata(const Json& json) const;
  void read_entry(const std::string& name, const Json& json);
  void check_layout() const;
  const Entry& find(const std::string& name) const;

  const std::string path_;
  Map map_;
  const uint8_t* data_ = nullptr;
  uint64_t data_size_ = 0;
  std::vector<std::string> names_;
  std::map<std::string, Entry> entries_;
};

}  // namespace cohort
