#include "job/resumable_file.h"

#include <algorithm>
#include <filesystem>

#include "core/log.h"
#include "sys/input_file.h"
#include "text/utf8.h"

namespace cohort {
namespace {

namespace fs = std::filesystem;

std::string hidden_state_path(const std::string& path) {
  const fs::path file(path);
  return (file.parent_path() / str(".", file.filename().string(), ".state")).string();
}

// Throws InputError that names the first setting that differs.
void check_settings(const Json& recorded, const Json& wanted, const std::string& path) {
  for (const auto& [key, value] : wanted.as_object())
    if (const std::string was = recorded.get_or_null(key).to_text(); was != value.as_string())
      throw InputError(str(path, " was written with another setting: ", key, " was ", excerpt(was),
                           ", and is ", excerpt(value.as_string()),
                           "; hint: the setting of before continues the file, another name begins "
                           "a new one"));
}

void append_to(AppendFile& file, const std::string& path, std::string_view piece) {
  if (const std::string why = file.append(piece); !why.empty())
    throw Error(str("cannot write ", path, ": ", why,
                    "; hint: free space, and the same command continues the file"));
}

}  // namespace

ResumableFile::ResumableFile(const std::string& path, const ConfigFields& settings)
    : path_(path), state_path_(hidden_state_path(path)) {
  if (readable_size(path_) > 0 && !path_exists(state_path_))
    throw InputError(str(path_, " exists, and ", state_path_,
                         ", by which a command would continue it, does not; hint: another name, or "
                         "remove the file"));
  lock_.emplace(state_path_);
  if (!lock_->is_open()) throw_errno<InputError>("cannot write ", state_path_);
  if (!lock_->try_lock())
    throw InputError(str("another process writes ", path_, "; hint: wait for it to end"));
  Json header;
  for (const auto& [key, value] : settings) header.set(key, value);
  resume(header.dump());
  for (const auto& [file, name] : {std::pair{&lines_, state_path_}, {&file_, path_}})
    if (const std::string why = file->open(name); !why.empty())
      throw InputError(str("cannot write ", name, ": ", why));
  if (readable_size(state_path_) == 0) append_to(lines_, state_path_, header.dump() + "\n");
}

// Reads the state as far as the file has its pieces, and removes what follows in both.
void ResumableFile::resume(const std::string& settings) {
  const int64_t size = std::max<int64_t>(0, readable_size(path_));
  const std::string text = path_exists(path_) ? read_text_file(state_path_) : "";
  size_t lines = 0;  // bytes of the state that stay
  // The end of the first piece that the file lacks, or has in part; else of the last one.
  int64_t piece_end = 0;
  bool changed = false;
  for (size_t end; !changed && (end = text.find('\n', lines)) != text.npos; lines = end + 1) {
    const std::string line = text.substr(lines, end - lines);
    const Json record = parse_json(line, state_path_);
    if (lines == 0) {
      if (size == 0 && line != settings) break;  // a file without a byte may begin again
      check_settings(record, parse_json(settings, state_path_), path_);
      continue;
    }
    piece_end = record.at("end").as_int();
    if (piece_end > size) break;
    sum_ = checksum(piece_end > size_ ? InputFile(path_).read(size_, piece_end) : "", sum_);
    changed = piece_end < size_ || hex(sum_) != record.at("checksum").as_string();
    if (changed) break;
    size_ = piece_end;
    state_ = record.at("state");
  }
  if (changed || size > std::max(size_, piece_end))
    throw InputError(str(path_, " has other bytes than this command has written, at byte ", size_,
                         " or after it; hint: restore it, or remove ", path_, " and ", state_path_,
                         " to begin again"));
  if (size > size_)
    logging::info(path_, ": removed ", size - size_, " bytes that were written in part");
  if (size > size_) fs::resize_file(path_, static_cast<uintmax_t>(size_));
  fs::resize_file(state_path_, lines);
}

void ResumableFile::append(std::string_view piece, const Json& state) {
  const uint64_t sum = checksum(piece, sum_);
  const int64_t end = size_ + std::ssize(piece);
  const Json record = Json().set("end", end).set("checksum", hex(sum)).set("state", state);
  append_to(lines_, state_path_, record.dump() + "\n");
  append_to(file_, path_, piece);
  sum_ = sum;
  size_ = end;
  state_ = state;
}

}  // namespace cohort
