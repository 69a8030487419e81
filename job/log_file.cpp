#include "job/log_file.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/log.h"
#include "text/json.h"

namespace cohort {
namespace {

// True for a line that belongs to the steps before a resume; nullopt for a damaged line.
std::optional<bool> is_kept(const std::string& line, const std::string& path, int64_t step,
                            bool evaluated) {
  try {
    const Json json = parse_json(line, path);
    const int64_t at = json.at("step").as_int();
    return at < step || (at == step && (evaluated || json.find("eval") == nullptr));
  } catch (const InputError&) {
    return std::nullopt;
  }
}

}  // namespace

LogFile::LogFile(std::string path) : path_(std::move(path)) {
  if (path_exists(path_)) before_ = read_text_file(path_);
}

void LogFile::start(int64_t step, bool evaluated) {
  std::string good, damaged;
  for (size_t begin = 0, end = 0; begin < before_.size(); begin = end) {
    end = std::min(before_.find('\n', begin), before_.size() - 1) + 1;
    const std::string line = before_.substr(begin, end - begin);
    const bool whole = line.back() == '\n';
    if (const auto kept = is_kept(line, path_, step, evaluated); kept.has_value())
      good += !*kept ? "" : whole ? line : line + "\n";
    else if (whole)  // else an incomplete last line after a kill
      damaged += line;
  }
  if (!damaged.empty()) {
    const std::string copy = path_ + ".damaged";
    const std::string earlier = path_exists(copy) ? read_text_file(copy) : "";
    replace_file(copy, earlier + damaged);
    logging::warn(path_, ": ", std::ranges::count(damaged, '\n'), " damaged lines moved to ", copy);
  }
  if (good != before_) replace_file(path_, good);
  before_.clear();
  if (const std::string why = lines_.open(); !why.empty())
    throw Error(str("cannot open ", path_, " for writing: ", why));
}

void LogFile::write(const std::string& line) {
  if (const std::string warning = lines_.write(line + "\n"); !warning.empty())
    logging::warn(warning);
}

std::string KeptLines::write(const std::string& line) {
  const std::lock_guard lock(mutex_);
  kept_ += line;
  if (write_kept() || std::exchange(warned_, true)) return "";
  return str("cannot write ", path_, ": ", why_,
             "; its lines are kept and retried with the next one");
}

void KeptLines::finish() {
  const std::lock_guard lock(mutex_);
  if (write_kept()) return;
  throw Error(str("cannot write ", path_, ": ", why_, "; its last ",
                  std::ranges::count(kept_, '\n'),
                  " lines are lost; the checkpoint of this step is saved"));
}

bool KeptLines::write_kept() {
  while (!kept_.empty()) {
    const std::string line = kept_.substr(0, kept_.find('\n') + 1);
    why_ = file_.append(line);
    if (!why_.empty()) return false;
    kept_.erase(0, line.size());
  }
  return true;
}

}  // namespace cohort
