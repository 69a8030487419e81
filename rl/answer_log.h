// The answers that the servers of a run's rewards have given: a line of RUN/judge.jsonl each, with
// the hash of the request, the score, and the text. Equal requests are asked once, also by a
// resumed run, which thus has the same rewards. A judgement without a score has {"error": "..."} in
// its place, and does not count as an answer.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "core/non_copyable.h"
#include "sys/files.h"
#include "text/json.h"

namespace cohort {

class AnswerLog : NonCopyable {
 public:
  // The log of a file, which is one in a process; an empty path has one of its own. Throws as the
  // constructor does.
  static std::shared_ptr<AnswerLog> open(const std::string& path);
  // Reads what the file has; a line that a crash has cut is left out. Empty path: the answers are
  // kept in memory only. Throws InputError if the file can be neither read nor written.
  explicit AnswerLog(const std::string& path);

  // Thread-safe, as add() is. The score of a request; nullopt: it has none.
  std::optional<Json> find(const std::string& request) const;
  // Appends a line, unless the request has a score. An object is the error of an answer without
  // one. Throws InputError if it cannot be written.
  void add(const std::string& request, const Json& score, std::string_view text);

 private:
  const std::string path_;
  AppendFile file_;
  mutable std::mutex mutex_;
  std::map<std::string, Json> scores_;  // by request
};

}  // namespace cohort
