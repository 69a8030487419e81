// The safetensors format, written from its specification. The reader trusts nothing: a header is
// checked completely before the first tensor byte is touched.
#include "data/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <span>

#include "core/descriptor.h"
#include "data/json.h"

namespace cohort {
namespace {

static_assert(std::endian::native == std::endian::little, "tensors are stored little-endian");

constexpr uint64_t kMaxHeader = 100'000'000;
constexpr const char* kMetadata = "__metadata__";

struct DTypeName {
  DType dtype;
  const char* name;
};
constexpr DTypeName kDTypes[] = {{DType::kF64, "F64"}, {DType::kF32, "F32"}, {DType::kBF16, "BF16"},
                                 {DType::kI64, "I64"}, {DType::kI32, "I32"}, {DType::kU8, "U8"}};

std::string system_reason() {
  return std::strerror(errno);
}

bool write_all(int fd, const void* data, size_t size) {
  const char* next = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t n = ::write(fd, next, size);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return false;
    next += n;
    size -= static_cast<size_t>(n);
  }
  return true;
}

// The JSON header, padded with spaces so that the first tensor starts at a multiple of 8 bytes.
std::string make_header(const NamedTensors& tensors) {
  Json header = Json::Object{};
  std::set<std::string> seen{kMetadata};
  int64_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    COHORT_CHECK(tensor.defined(), "[safetensors] tensor '", name, "' is undefined");
    COHORT_CHECK(seen.insert(name).second, "[safetensors] the name '", name,
                 "' is reserved or given twice");
    const auto* type = std::find_if(std::begin(kDTypes), std::end(kDTypes),
                                    [&](const DTypeName& d) { return d.dtype == tensor.dtype(); });
    Json shape = Json::Array{};
    for (const int64_t d : tensor.shape()) shape.push_back(d);
    const int64_t end = offset + tensor.nbytes();
    header.set(name, Json()
                         .set("dtype", type->name)
                         .set("shape", std::move(shape))
                         .set("data_offsets", Json::Array{offset, end}));
    offset = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return text;
}

}  // namespace

void write_safetensors(const std::string& path, const NamedTensors& tensors) {
  const std::string header = make_header(tensors);
  COHORT_CHECK(header.size() <= kMaxHeader, "[safetensors] ", path, ": a header of ", header.size(),
               " bytes exceeds the format's ", kMaxHeader);
  const auto fail = [&](const char* what) {
    throw Error(str(path, ": ", what, ": ", system_reason()));
  };
  Descriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (file.get() < 0) fail("cannot be opened for writing");
  const uint64_t length = header.size();
  if (!write_all(file.get(), &length, sizeof length) ||
      !write_all(file.get(), header.data(), header.size()))
    fail("cannot be written");
  for (const auto& [name, tensor] : tensors) {
    const Tensor bytes = tensor.to(Device{}).contiguous();
    if (bytes.numel() > 0 &&
        !write_all(file.get(), bytes.raw(), static_cast<size_t>(bytes.nbytes())))
      fail("cannot be written");
  }
  if (::fsync(file.get()) != 0) fail("cannot be flushed to disk");
  if (!file.close()) fail("cannot be closed");
}

SafetensorsFile::Map::~Map() {
  if (begin != nullptr) ::munmap(begin, size);
}

void SafetensorsFile::open() {
  const Descriptor file(::open(path_.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) fail("cannot be opened: " + system_reason());
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) fail("cannot be read: " + system_reason());
  if (!S_ISREG(status.st_mode)) fail("is not a file; hint: name the .safetensors file");
  const auto size = static_cast<size_t>(status.st_size);
  if (size < sizeof(uint64_t))
    fail(str("is truncated: ", size, " bytes do not hold the length of a header"));
  void* begin = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (begin == MAP_FAILED) fail("cannot be mapped: " + system_reason());
  map_.begin = begin;
  map_.size = size;
}

void SafetensorsFile::read_header() {
  const auto* bytes = static_cast<const char*>(map_.begin);
  uint64_t length;
  std::memcpy(&length, bytes, sizeof length);
  const uint64_t rest = map_.size - sizeof length;
  if (length > kMaxHeader || length > rest)
    fail(str("is truncated or not in safetensors format: a header of ", length, " bytes, with ",
             rest, " bytes left in the file"));
  const std::string_view text(bytes + sizeof length, length);
  // The format demands it: a file cannot be of another type at the same time.
  if (!text.starts_with('{')) fail("malformed header: does not start with '{'");
  const Json header = parse_json(text, path_ + ": malformed header");
  data_ = static_cast<const uint8_t*>(map_.begin) + sizeof length + length;
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
  if (!json.is_object()) fail(str("malformed header: ", kMetadata, " is no object"));
  for (const auto& [key, value] : json.as_object())
    if (!value.is_string()) fail(str("malformed header: ", kMetadata, " '", key, "' is not text"));
}

namespace {

// The list of whole numbers from 0 under `key`, or nothing.
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

// Product of the sizes and `size`, or nothing if it leaves int64.
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
  const auto* type = std::find_if(std::begin(kDTypes), std::end(kDTypes), [&](const DTypeName& d) {
    return d.name == type_name->as_string();
  });
  if (type == std::end(kDTypes))
    fail(str(tensor, " has dtype ", type_name->as_string(),
             "; known: F64, F32, BF16, I64, I32, U8; hint: convert the file to one of these"));
  if (shape->size() > kMaxRank)
    fail(str(tensor, " has ", shape->size(), " dimensions, more than ", kMaxRank));
  const auto bytes = byte_count(*shape, dtype_size(type->dtype));
  const auto begin = static_cast<uint64_t>((*offsets)[0]),
             end = static_cast<uint64_t>((*offsets)[1]);
  if (begin > end || end > data_size_)
    fail(str(tensor, " lies at bytes ", begin, " to ", end, " of ", data_size_,
             "; the file is truncated or damaged"));
  if (!bytes || static_cast<uint64_t>(*bytes) != end - begin)
    fail(str(tensor, " has ", end - begin, " bytes, which its shape and dtype contradict"));
  Entry entry{type->dtype, {}, begin, end};
  for (const int64_t d : *shape) entry.shape.push_back(d);
  names_.push_back(name);
  entries_.emplace(name, entry);
}

// The tensors must cover the data without holes and overlaps.
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

SafetensorsFile::SafetensorsFile(const std::string& path) : path_(path) {
  open();
  read_header();
}

Tensor SafetensorsFile::read(const std::string& name) const {
  const Entry& entry = find(name);
  Tensor tensor = Tensor::empty(entry.shape, entry.dtype);
  if (entry.end > entry.begin)
    std::memcpy(tensor.raw(), data_ + entry.begin, entry.end - entry.begin);
  return tensor;
}

}  // namespace cohort
