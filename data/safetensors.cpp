// The safetensors format, implemented from its specification. The reader validates the whole header
// before it touches tensor data.
#include "data/safetensors.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <set>
#include <span>

#include "core/sizes.h"
#include "core/text.h"
#include "data/parallel_try.h"
#include "sys/files.h"
#include "text/json.h"

namespace cohort {
namespace {

static_assert(std::endian::native == std::endian::little, "tensors are stored little-endian");

constexpr uint64_t kMaxHeader = 100'000'000;
constexpr const char* kMetadata = "__metadata__";

// By DType. The last two are written, but a file that holds them is not read: they mean little
// without scales, whose names differ between tools.
constexpr const char* kNames[] = {"F64", "F32", "BF16", "I32", "I64", "U8", "F16", "F8_E4M3", "I8"};
constexpr const char* kHalf = kNames[static_cast<int>(DType::kF16)];

// The DType of a type that can be written.
DType dtype_of_type(const std::string& type) {
  const auto* name = std::find(std::begin(kNames), std::end(kNames), type);
  COHORT_CHECK(name != std::end(kNames), "[safetensors] cannot write the type ", type);
  return static_cast<DType>(name - kNames);
}

// The tensor in f16. Throws InputError for a number that f16 does not hold.
Tensor to_halves(const Tensor& tensor, const std::string& name) {
  constexpr int64_t kBlock = 64 << 10;
  constexpr double kLargest = 65504;
  const Tensor exact = tensor.dtype() == DType::kBF16 ? tensor.to(DType::kF32) : tensor;
  Tensor halves = Tensor::empty(tensor.shape(), DType::kF16);
  f16* out = halves.data<f16>();
  dispatch_float(exact.dtype(), "safetensors", [&]<class T>() {
    const T* values = exact.data<T>();
    parallel_try(ceil_div(exact.numel(), kBlock), 1, [&](int64_t block) {
      for (int64_t i = block * kBlock; i < std::min(exact.numel(), (block + 1) * kBlock); ++i) {
        if (std::abs(values[i]) > kLargest)
          throw InputError(
              str("the tensor '", name, "' holds ", values[i],
                  ", beyond 65504, the largest number of f16; hint: --dtype bf16 or f32"));
        out[i] = f16(static_cast<double>(values[i]));
      }
    });
  });
  return halves;
}

// The source's tensor on the host with the bytes for the file.
Tensor make_stored(const TensorSource& source) {
  const Tensor tensor = source.make().to(Device{}).contiguous();
  COHORT_CHECK(tensor.shape() == source.shape, "[safetensors] ", source.name, ": expected ",
               source.shape.str(), ", got ", tensor.shape().str());
  const DType dtype = dtype_of_type(source.type);
  return dtype == DType::kF16 ? to_halves(tensor, source.name) : tensor.to(dtype);
}

// The JSON header, padded with spaces so that the data starts at a multiple of 8 bytes.
std::string make_header(const std::vector<TensorSource>& tensors) {
  Json header = Json::Object{{kMetadata, Json().set("format", "pt")}};
  std::set<std::string> seen{kMetadata};
  int64_t offset = 0;
  for (const TensorSource& tensor : tensors) {
    COHORT_CHECK(seen.insert(tensor.name).second, "[safetensors] the name '", tensor.name,
                 "' is reserved or given twice");
    Json shape = Json::Array{};
    for (const int64_t d : tensor.shape) shape.push_back(d);
    const int64_t end = offset + tensor.bytes();
    header.set(tensor.name, Json()
                                .set("dtype", tensor.type)
                                .set("shape", std::move(shape))
                                .set("data_offsets", Json::Array{offset, end}));
    offset = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return text;
}

}  // namespace

// The format's types. F16 is read as f32; types without a DType have a size only.
const SafetensorsFile::StoredType SafetensorsFile::kTypes[] = {
    {"F64", 8, DType::kF64},   {"F32", 4, DType::kF32},      {"F16", 2, DType::kF32},
    {"BF16", 2, DType::kBF16}, {"I64", 8, DType::kI64},      {"I32", 4, DType::kI32},
    {"U8", 1, DType::kU8},     {"I16", 2, std::nullopt},     {"I8", 1, DType::kI8},
    {"U64", 8, std::nullopt},  {"U32", 4, std::nullopt},     {"U16", 2, std::nullopt},
    {"BOOL", 1, std::nullopt}, {"F8_E4M3", 1, std::nullopt}, {"F8_E5M2", 1, std::nullopt}};

int64_t TensorSource::bytes() const {
  return shape.numel() * static_cast<int64_t>(dtype_size(dtype_of_type(type)));
}

namespace {

std::string_view bytes_of(const void* data, size_t size) {
  return {static_cast<const char*>(data), size};
}

std::string file_error(DurableFile::Step step, const std::string& path, const std::string& reason) {
  constexpr const char* kProblems[] = {"opened for writing", "written", "flushed to disk",
                                       "closed"};
  return str(path, ": cannot be ", kProblems[static_cast<int>(step)], ": ", reason);
}

}  // namespace

const char* stored_name(DType dtype) {
  return kNames[static_cast<int>(dtype)];
}

Tensor stored_values(const Tensor& tensor, const std::string& type, const std::string& name) {
  const Tensor stored = make_stored({name, tensor.shape(), type, [&] { return tensor; }});
  const Tensor values = stored.to(tensor.dtype() == DType::kF64 ? DType::kF64 : DType::kF32);
  dispatch_float(values.dtype(), "safetensors", [&]<class T>() {
    for (const T value : std::span(values.data<T>(), static_cast<size_t>(values.numel())))
      if (!std::isfinite(value))
        throw InputError(
            str("the tensor '", name, "' holds ", value, " as ", type,
                "; hint: --dtype f32 if a number is too large for this dtype, else the "
                "training that wrote it diverged: use an earlier checkpoint"));
  });
  return values.to(tensor.dtype());
}

SafetensorsWriter::SafetensorsWriter(const std::string& path,
                                     const std::vector<TensorSource>& tensors)
    : file_(path, file_error) {
  const std::string header = make_header(tensors);
  COHORT_CHECK(header.size() <= kMaxHeader, "[safetensors] ", path, ": a header of ", header.size(),
               " bytes exceeds the format's ", kMaxHeader);
  const uint64_t length = header.size();
  file_.write(bytes_of(&length, sizeof length));
  file_.write(header);
}

void SafetensorsWriter::append(const TensorSource& tensor) {
  const Tensor bytes = make_stored(tensor);
  file_.write(bytes_of(bytes.raw(), static_cast<size_t>(bytes.nbytes())));
}

void SafetensorsWriter::finish() {
  file_.finish();
}

void write_sources(const std::string& path, const std::vector<TensorSource>& tensors) {
  SafetensorsWriter writer(path, tensors);
  for (const TensorSource& tensor : tensors) writer.append(tensor);
  writer.finish();
}

void SafetensorsFile::read_header() {
  uint64_t length;
  const auto size = static_cast<uint64_t>(file_.size());
  if (size < sizeof length)
    fail(str("is truncated: ", size, " bytes do not hold the length of a header"));
  file_.read_to(&length, 0, sizeof length);
  constexpr std::string_view kPointer = "version https://git-lfs";
  if (size > kPointer.size() && file_.read(0, kPointer.size()) == kPointer)
    fail("is a pointer of Git LFS, without the weights; hint: git lfs pull in its folder");
  const uint64_t rest = size - sizeof length;
  if (length > kMaxHeader || length > rest)
    fail(str("is truncated or not in safetensors format: a header of ", length, " bytes, with ",
             rest, " bytes left in the file"));
  data_begin_ = sizeof length + length;
  const std::string text = file_.read(sizeof length, static_cast<int64_t>(data_begin_));
  // Required by the format, so that a file cannot be valid in another format too.
  if (!text.starts_with('{')) fail("malformed header: does not start with '{'");
  const Json header = parse_json(text, file_.path() + ": malformed header");
  data_size_ = rest - length;
  for (const auto& [name, json] : header.as_object()) {
    if (name == kMetadata)
      check_metadata(json);
    else
      read_entry(name, json);
  }
  check_layout();
}

void SafetensorsFile::check_metadata(const Json& json) const {
  if (json.is_null()) return;
  if (!json.is_object()) fail(str("malformed header: ", kMetadata, " is not an object"));
  for (const auto& [key, value] : json.as_object())
    if (!value.is_string()) fail(str("malformed header: ", kMetadata, " '", key, "' is not text"));
}

namespace {

// The list of non-negative integers under `key`; nullopt if it is not one.
std::optional<std::vector<int64_t>> find_sizes(const Json& json, const char* key) {
  const Json* list = json.find(key);
  if (list == nullptr || !list->is_array()) return {};
  std::vector<int64_t> sizes;
  for (const Json& item : list->as_array()) {
    if (!item.is_int() || item.as_int() < 0) return {};
    sizes.push_back(item.as_int());
  }
  return sizes;
}

// Product of the sizes and `size`; nullopt on int64 overflow.
std::optional<int64_t> byte_count(std::span<const int64_t> sizes, size_t size) {
  auto bytes = static_cast<int64_t>(size);
  for (const int64_t d : sizes)
    if (__builtin_mul_overflow(bytes, d, &bytes)) return {};
  return bytes;
}

}  // namespace

void SafetensorsFile::read_entry(const std::string& name, const Json& json) {
  const std::string tensor = "tensor '" + name + "'";
  const Json* type_name = json.find("dtype");
  const auto shape = find_sizes(json, "shape"), offsets = find_sizes(json, "data_offsets");
  if (type_name == nullptr || !type_name->is_string() || !shape || !offsets || offsets->size() != 2)
    fail(str("malformed header: ", tensor, " needs dtype, shape and data_offsets"));
  const auto* type = std::ranges::find(kTypes, type_name->as_string(), &StoredType::name);
  if (type == std::end(kTypes))
    fail(str(tensor, " has dtype ", type_name->as_string(),
             ", which is not known; hint: convert the file to F32 or BF16"));
  if (shape->size() > kMaxRank)
    fail(str(tensor, " has ", shape->size(), " dimensions, more than ", kMaxRank));
  const auto bytes = byte_count(*shape, type->size);
  const auto begin = static_cast<uint64_t>((*offsets)[0]),
             end = static_cast<uint64_t>((*offsets)[1]);
  if (begin > end || end > data_size_)
    fail(str(tensor, " lies at bytes ", begin, " to ", end, " of ", data_size_,
             "; the file is truncated or damaged"));
  if (!bytes || static_cast<uint64_t>(*bytes) != end - begin)
    fail(str(tensor, " has ", end - begin, " bytes, which its shape and dtype contradict"));
  Entry entry{type, {}, begin, end};
  for (const int64_t d : *shape) entry.shape.push_back(d);
  names_.push_back(name);
  entries_.emplace(name, entry);
}

// Tensors must cover the data without gaps and overlaps.
void SafetensorsFile::check_layout() const {
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  for (const auto& [name, entry] : entries_) ranges.emplace_back(entry.begin, entry.end);
  std::sort(ranges.begin(), ranges.end());
  uint64_t covered = 0;
  for (const auto& [begin, end] : ranges) {
    if (begin != covered)
      fail(str("damaged: tensors ", begin < covered ? "overlap" : "leave a hole", " at byte ",
               std::min(begin, covered), " of the data"));
    covered = end;
  }
  if (covered != data_size_)
    fail(str("damaged: ", data_size_ - covered, " bytes follow the last tensor"));
}

const SafetensorsFile::Entry& SafetensorsFile::find(const std::string& name) const {
  const auto it = entries_.find(name);
  if (it != entries_.end()) return it->second;
  constexpr size_t kMaxListed = 20;
  std::string known;
  for (size_t i = 0; i < std::min(names_.size(), kMaxListed); ++i)
    known += (known.empty() ? "" : ", ") + names_[i];
  if (names_.size() > kMaxListed) known += str(" and ", names_.size() - kMaxListed, " more");
  fail(str("has no tensor '", name, "'; it has: ", known));
}

DType SafetensorsFile::dtype(const std::string& name) const {
  const Entry& entry = find(name);
  if (!entry.type->dtype)
    fail(str("tensor '", name, "' has dtype ", entry.type->name,
             ", which is not supported; hint: convert the file to F32 or BF16"));
  return *entry.type->dtype;
}

Tensor SafetensorsFile::read(const std::string& name) const {
  Tensor tensor = Tensor::empty(find(name).shape, dtype(name));
  Tensor flat = tensor.reshape({tensor.numel()});
  read_elements(find(name), 0, flat);
  return tensor;
}

void SafetensorsFile::read_rows(const std::string& name, int64_t first, Tensor& out) const {
  const Entry& entry = find(name);
  Shape expected = entry.shape;
  COHORT_CHECK(out.rank() > 0 && out.rank() == expected.rank() && first >= 0 &&
                   first + out.dim(0) <= expected[0],
               "[safetensors] rows ", first, " ... of ", expected.str(), " do not fit ", out.str());
  expected[0] = out.dim(0);
  COHORT_CHECK(out.shape() == expected, "[safetensors] expected rows ", expected.str(), ", got ",
               out.str());
  dtype(name);  // throws if unsupported
  const int64_t row = out.dim(0) == 0 ? 0 : out.numel() / out.dim(0);
  Tensor flat = out.reshape({out.numel()});
  read_elements(entry, first * row, flat);
}

void SafetensorsFile::read_range(const std::string& name, int64_t first, Tensor& out) const {
  const Entry& entry = find(name);
  COHORT_CHECK(out.rank() == 1 && first >= 0 && first + out.numel() <= entry.shape.numel(),
               "[safetensors] elements ", first, " ... of ", entry.shape.str(), " do not fit ",
               out.str());
  dtype(name);  // throws if unsupported
  read_elements(entry, first, out);
}

// All threads read one chunk at a time into plain memory, because it may still be on disk; the
// chunk is then copied to its destination while the next one is read ahead.
void SafetensorsFile::read_elements(const Entry& entry, int64_t first, Tensor& out) const {
  constexpr int64_t kChunk = 4 << 20, kBlock = 64 << 10;  // elements
  const bool half = std::string_view(entry.type->name) == kHalf;
  const DType dtype = *entry.type->dtype;
  const auto size = static_cast<int64_t>(entry.type->size);
  int64_t source = static_cast<int64_t>(data_begin_ + entry.begin) + first * size;
  for (int64_t begin = 0; begin < out.numel(); begin += kChunk) {
    const int64_t count = std::min(kChunk, out.numel() - begin);
    Tensor target = out.narrow(0, begin, count);
    const bool direct = target.device().is_cpu() && target.dtype() == dtype;
    Tensor chunk = direct ? target : Tensor::empty({count}, dtype);
    parallel_try(ceil_div(count, kBlock), 1, [&](int64_t block) {
      const int64_t from = block * kBlock, n = std::min(kBlock, count - from);
      if (!half) {
        file_.read_to(static_cast<char*>(chunk.raw()) + from * size, source + from * size,
                      n * size);
        return;
      }
      std::vector<f16> values(static_cast<size_t>(n));
      file_.read_to(values.data(), source + from * size, n * size);
      std::transform(values.begin(), values.end(), chunk.data<float>() + from,
                     [](f16 v) { return static_cast<float>(v); });
    });
    source += count * size;
    if (count == kChunk) file_.will_read(source, source + kChunk * size);
    if (!direct) target.copy_(chunk);
  }
}

namespace {

std::string file_name(const std::string& stem) {
  return stem + ".safetensors";
}
std::string index_name(const std::string& stem) {
  return file_name(stem) + ".index.json";
}

}  // namespace

std::string shard_name(const std::string& stem, int64_t number, int64_t count) {
  return file_name(count == 1 ? stem : str(stem, "-", padded(number, 5), "-of-", padded(count, 5)));
}

std::string write_index(
    const std::string& dir, const std::string& stem,
    const std::vector<std::pair<std::string, std::vector<TensorSource>>>& files) {
  int64_t total = 0;
  Json::Object weight_map;
  for (const auto& [file, tensors] : files)
    for (const TensorSource& tensor : tensors) {
      total += tensor.bytes();
      weight_map.emplace_back(tensor.name, file);
    }
  Json index;
  index.set("metadata", Json().set("total_size", total)).set("weight_map", std::move(weight_map));
  DurableFile file(dir + "/" + index_name(stem), file_error);
  file.write(index.dump(2) + "\n");
  file.finish();
  return index_name(stem);
}

std::vector<std::string> write_sharded(const std::string& dir, const std::string& stem,
                                       const std::vector<TensorSource>& tensors,
                                       int64_t shard_bytes) {
  std::vector<std::pair<std::string, std::vector<TensorSource>>> shards(1);
  int64_t bytes = 0;
  for (const TensorSource& tensor : tensors) {
    const int64_t size = tensor.bytes();
    if (bytes > 0 && bytes + size > shard_bytes) {
      shards.emplace_back();
      bytes = 0;
    }
    bytes += size;
    shards.back().second.push_back(tensor);
  }
  std::vector<std::string> names;
  for (auto& [name, sources] : shards) {
    name = shard_name(stem, std::ssize(names) + 1, std::ssize(shards));
    write_sources(dir + "/" + name, sources);
    names.push_back(name);
  }
  if (shards.size() > 1) names.push_back(write_index(dir, stem, shards));
  return names;
}

bool SafetensorsFolder::exists(const std::string& dir, const std::string& stem) {
  return path_exists(dir + "/" + file_name(stem)) || path_exists(dir + "/" + index_name(stem));
}

SafetensorsFolder::SafetensorsFolder(const std::string& dir, const std::string& stem) {
  path_ = dir + "/" + file_name(stem);
  const std::string index = dir + "/" + index_name(stem);
  if (!path_exists(path_) && path_exists(index)) {
    path_ = index;
    open_shards(dir);
    return;
  }
  files_.push_back(std::make_unique<SafetensorsFile>(path_));
  file_names_ = {file_name(stem)};
  for (const std::string& name : files_[0]->names()) file_of_[name] = files_[0].get();
}

void SafetensorsFolder::open_shards(const std::string& dir) {
  const Json index = parse_json(read_input_file(path_), path_);
  const Json* weight_map = index.find("weight_map");
  if (weight_map == nullptr || !weight_map->is_object())
    throw InputError(path_ + ": expected an object weight_map");
  std::map<std::string, const SafetensorsFile*> shards;
  for (const auto& [name, shard_name] : weight_map->as_object()) {
    const std::string& file = shard_name.as_string();
    if (file.empty() || file.find('/') != file.npos)
      throw InputError(str(path_, ": weight_map: '", file, "' is not a file name"));
    const SafetensorsFile*& shard = shards[file];
    if (shard == nullptr) {
      files_.push_back(std::make_unique<SafetensorsFile>(dir + "/" + file));
      shard = files_.back().get();
    }
    if (!shard->contains(name))
      throw InputError(
          str(path_, ": weight_map says that ", file, " holds '", name, "', but it does not"));
    file_of_[name] = shard;
  }
  for (const auto& [name, shard] : shards) file_names_.push_back(name);
}

const SafetensorsFile* SafetensorsFolder::find(const std::string& name) const {
  const auto it = file_of_.find(name);
  return it == file_of_.end() ? nullptr : it->second;
}

const SafetensorsFile& SafetensorsFolder::get(const std::string& name) const {
  if (const SafetensorsFile* file = find(name)) return *file;
  throw InputError(str(path_, ": has no tensor '", name, "'"));
}

std::vector<std::string> SafetensorsFolder::names() const {
  std::vector<std::string> all;
  for (const auto& [name, file] : file_of_) all.push_back(name);
  return all;
}

}  // namespace cohort
