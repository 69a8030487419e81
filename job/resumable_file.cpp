#include "job/resumable_file.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "core/log.h"
#include "sys/input_file.h"
#include "text/utf8.h"

namespace cohort {
namespace {

namespace fs = std::filesystem;

constexpr size_t kDigits = 16;  // digits of the checksum that begins a line of the state

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

void truncate_file(const std::string& path, int64_t size) {
  std::error_code error;
  fs::resize_file(path, static_cast<uintmax_t>(size), error);
  if (error) throw Error(str("cannot truncate ", path, ": ", error.message()));
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
  for (const auto& [file, name] : {std::pair{&records_, state_path_}, {&file_, path_}})
    if (const std::string why = file->open(name); !why.empty())
      throw InputError(str("cannot write ", name, ": ", why));
  if (records_sum_ == 0) append_record(parse_json(header.dump(), state_path_));
}

// Reads the state as far as the file has its pieces, and removes what follows in both.
void ResumableFile::resume(const std::string& settings) {
  const int64_t size = std::max<int64_t>(0, readable_size(path_));
  const std::string text = path_exists(path_) ? read_text_file(state_path_) : "";
  int64_t records_size = 0, in_progress = 0;  // bytes of the lines; end of a partly written piece
  const auto damaged = [&](const std::string& path, const std::string& how) {
    throw InputError(str(path, " ", how, "; hint: restore it, or remove ", path_, " and ",
                         state_path_, " to begin again"));
  };
  for (size_t begin = 0, end = 0; (end = text.find('\n', begin)) != text.npos; begin = end + 1) {
    const std::string line = text.substr(begin, end - begin);
    const std::string body = line.substr(std::min(line.size(), kDigits + 1));
    const uint64_t sum = checksum(body, records_sum_);
    if (line != hex(sum) + " " + body) damaged(state_path_, "is damaged");
    const Json record = parse_json(body, state_path_);
    if (begin == 0) {
      if (size == 0 && body != settings) break;  // a file without a byte may begin again
      check_settings(record, parse_json(settings, state_path_), path_);
    } else {
      const int64_t piece_end = record.at("end").as_int();
      if (piece_end > size) {
        in_progress = piece_end;
        break;
      }
      const std::string piece =
          piece_end > size_ ? InputFile(path_).read(size_, piece_end) : std::string();
      file_sum_ = checksum(piece, file_sum_);
      if (piece_end < size_ || hex(file_sum_) != record.at("checksum").as_string())
        damaged(path_, str("has changed since it was written, at byte ", size_, " or after it"));
      size_ = piece_end;
      state_ = record.at("state");
    }
    records_sum_ = sum;
    records_size = static_cast<int64_t>(end) + 1;
  }
  if (size > size_ && in_progress == 0)
    damaged(path_, str("has bytes that this command has not written, from byte ", size_, " on"));
  if (size > size_)
    logging::info(path_, ": removed ", size - size_, " bytes that were written in part");
  if (size > size_) truncate_file(path_, size_);
  if (readable_size(state_path_) > records_size) truncate_file(state_path_, records_size);
}

void ResumableFile::append(std::string_view piece, const Json& state) {
  const uint64_t sum = checksum(piece, file_sum_);
  const int64_t end = size_ + static_cast<int64_t>(piece.size());
  append_record(Json().set("end", end).set("checksum", hex(sum)).set("state", state));
  if (const std::string why = file_.append(piece); !why.empty())
    throw Error(str("cannot write ", path_, ": ", why,
                    "; hint: free space, and the same command continues the file"));
  file_sum_ = sum;
  size_ = end;
  state_ = state;
}

void ResumableFile::append_record(const Json& record) {
  const std::string body = record.dump();
  const uint64_t sum = checksum(body, records_sum_);
  if (const std::string why = records_.append(str(hex(sum), " ", body, "\n")); !why.empty())
    throw Error(str("cannot write ", state_path_, ": ", why,
                    "; hint: free space, and the same command continues ", path_));
  records_sum_ = sum;
}

}  // namespace cohort
