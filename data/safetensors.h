// The safetensors format: u64 header length, JSON header, raw little-endian tensors. Reading checks
// every offset, size and dtype before it touches data.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/non_copyable.h"
#include "core/tensor.h"
#include "sys/files.h"
#include "sys/input_file.h"

namespace cohort {

class Json;

using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

// A tensor that is made when its turn to be written comes, so that one at a time is in memory.
struct TensorSource {
  std::string name;
  Shape shape;
  std::string type;              // in the file: "F16" or a type with a DType ("F32", "BF16", ...)
  std::function<Tensor()> make;  // its result is converted to `type`, rounded to nearest even
  int64_t bytes() const;         // in the file
};
// The name of a dtype in such a file, "F32".
const char* stored_name(DType dtype);
// The values on the host, in the tensor's dtype, that it has after it was stored as `type`: rounded
// to nearest even. `name` is for messages. Throws InputError as write_sharded() does, and for a
// number that is not finite, or not as `type`.
Tensor stored_values(const Tensor& tensor, const std::string& type, const std::string& name);
// A file whose tensors are written one by one.
class SafetensorsWriter : NonCopyable {
 public:
  // Creates the file and writes its header.
  SafetensorsWriter(const std::string& path, const std::vector<TensorSource>& tensors);
  // Makes and writes the next of these tensors.
  void append(const TensorSource& tensor);
  void finish();  // flushes to disk (fsync)

 private:
  DurableFile file_;
};
// The name of file `number` of `count`, from 1, or of the only one: STEM.safetensors.
std::string shard_name(const std::string& stem, int64_t number, int64_t count);
// Writes STEM.safetensors.index.json, for the tensors of each of the named files, and returns its
// name.
std::string write_index(
    const std::string& dir, const std::string& stem,
    const std::vector<std::pair<std::string, std::vector<TensorSource>>>& files);
// Writes in the given order and flushes to disk. Throws Error with the path and the
// system's reason.
void write_sources(const std::string& path, const std::vector<TensorSource>& tensors);
// Writes DIR/STEM.safetensors or, for more than `shard_bytes` of tensors, the shards
// STEM-00001-of-00003.safetensors, ... and their index STEM.safetensors.index.json. Returns the
// names of the files. Throws as write_sources() does, and InputError naming the tensor for a
// number beyond 65504, the largest of F16.
std::vector<std::string> write_sharded(const std::string& dir, const std::string& stem,
                                       const std::vector<TensorSource>& tensors,
                                       int64_t shard_bytes = 5'000'000'000);

// An open file, whose bytes are read when they are asked for: a mapping of a file that shrinks
// would end the process. The constructor throws InputError("PATH: ..."): missing or truncated file,
// overlapping or out-of-range tensors, unknown dtype, malformed header.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::string& path) : file_(path) { read_header(); }

  const std::vector<std::string>& names() const { return names_; }
  bool contains(const std::string& name) const { return entries_.contains(name); }
  Shape shape(const std::string& name) const { return find(name).shape; }
  // Dtype that read() returns: f32 for F16. Throws InputError for unsupported types (I16, F8, ...).
  DType dtype(const std::string& name) const;
  // Name of the type in the file, for instance "BF16".
  const char* stored_dtype(const std::string& name) const { return find(name).type->name; }
  int64_t bytes(const std::string& name) const {
    const Entry& entry = find(name);
    return static_cast<int64_t>(entry.end - entry.begin);
  }
  // Reads a tensor. Throws InputError listing the known names if there is no such tensor, and if
  // the file has become shorter.
  Tensor read(const std::string& name) const;
  // Reads rows first .. first + out.dim(0) - 1 of a tensor into `out` (contiguous, on any device),
  // converted to its dtype. Makes no other full copy.
  void read_rows(const std::string& name, int64_t first, Tensor& out) const;
  // Likewise elements first .. first + out.numel() - 1 in row-major order, into `out` [n].
  void read_range(const std::string& name, int64_t first, Tensor& out) const;

 private:
  struct StoredType {
    const char* name;
    size_t size;
    std::optional<DType> dtype;
  };
  struct Entry {
    const StoredType* type;
    Shape shape;
    uint64_t begin, end;  // byte offsets into the data behind the header
  };

  static const StoredType kTypes[];
  [[noreturn]] void fail(const std::string& message) const {
    throw InputError(file_.path() + ": " + message);
  }
  void read_header();
  void check_metadata(const Json& json) const;
  void read_entry(const std::string& name, const Json& json);
  void check_layout() const;
  const Entry& find(const std::string& name) const;
  void read_elements(const Entry& entry, int64_t first, Tensor& out) const;

  const InputFile file_;
  uint64_t data_begin_ = 0, data_size_ = 0;  // bytes of the file
  std::vector<std::string> names_;
  std::map<std::string, Entry> entries_;
};

// The tensors of DIR/STEM.safetensors or of the shards listed in DIR/STEM.safetensors.index.json.
// Throws InputError as SafetensorsFile does, and for an index that contradicts its shards.
class SafetensorsFolder {
 public:
  SafetensorsFolder(const std::string& dir, const std::string& stem);
  // True if the file or the index exists.
  static bool exists(const std::string& dir, const std::string& stem);

  // The file that holds a tensor; nullptr: none does.
  const SafetensorsFile* find(const std::string& name) const;
  // find(), which throws InputError if no file does.
  const SafetensorsFile& get(const std::string& name) const;
  std::vector<std::string> names() const;
  // The names of the files with tensors, sorted.
  const std::vector<std::string>& files() const { return file_names_; }
  // Path of the file or of the index.
  const std::string& path() const { return path_; }

 private:
  void open_shards(const std::string& dir);
  std::string path_;
  std::vector<std::string> file_names_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, const SafetensorsFile*> file_of_;
};

}  // namespace cohort
