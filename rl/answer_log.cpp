#include "rl/answer_log.h"

#include "core/progress.h"
#include "core/text.h"

namespace cohort {
namespace {

constexpr size_t kMaxText = 2000;  // bytes of a text that a line keeps

}  // namespace

std::shared_ptr<AnswerLog> AnswerLog::open(const std::string& path) {
  static std::mutex mutex;
  static std::map<std::string, std::weak_ptr<AnswerLog>> logs;
  if (path.empty()) return std::make_shared<AnswerLog>(path);
  const std::lock_guard lock(mutex);
  std::shared_ptr<AnswerLog> log = logs[path].lock();
  if (log == nullptr) logs[path] = log = std::make_shared<AnswerLog>(path);
  return log;
}

AnswerLog::AnswerLog(const std::string& path) : path_(path) {
  if (path_.empty()) return;
  const std::string before = path_exists(path_) ? read_text_file(path_) : "";
  for (size_t begin = 0, end = 0; begin < before.size(); begin = end + 1) {
    end = std::min(before.find('\n', begin), before.size());
    try {
      const Json line = parse_json(before.substr(begin, end - begin), path_);
      if (!line.at("score").is_object())
        scores_.emplace(line.at("request").as_string(), line.at("score"));
      note_progress();
    } catch (const InputError&) {  // what it answers is asked again
    }
  }
  std::string why = file_.open(path_);
  if (why.empty() && !before.empty() && before.back() != '\n') why = file_.append("\n");
  if (!why.empty()) throw InputError(str("cannot write ", path_, ": ", why));
}

std::optional<Json> AnswerLog::find(const std::string& request) const {
  const std::lock_guard lock(mutex_);
  const auto found = scores_.find(request);
  return found == scores_.end() ? std::nullopt : std::optional(found->second);
}

void AnswerLog::add(const std::string& request, const Json& score, std::string_view text) {
  size_t size = std::min(text.size(), kMaxText);
  while (size < text.size() && size > 0 && continues_utf8(text[size])) --size;
  Json line;
  line.set("request", request)
      .set("score", score)
      .set("text", std::string(text.substr(0, size)))
      .set("time", utc_now());
  const std::lock_guard lock(mutex_);
  if (!score.is_object() && !scores_.emplace(request, score).second) return;
  if (!path_.empty())
    if (const std::string why = file_.append(line.dump() + "\n"); !why.empty())
      throw InputError(str("cannot write ", path_, ": ", why));
}

}  // namespace cohort
