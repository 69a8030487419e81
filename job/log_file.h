// metrics.jsonl and completions.jsonl: one JSON object per line, each with its "step"; log.txt.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>

#include "core/non_copyable.h"
#include "sys/files.h"

namespace cohort {

// A file to which lines are appended atomically. One that cannot be written is kept and retried
// with the next one.
class KeptLines : NonCopyable {
 public:
  explicit KeptLines(std::string path) : path_(std::move(path)) {}
  ~KeptLines() {
    if (file_.is_open()) write_kept();
  }

  // Returns "", or the reason of the failure.
  std::string open() { return file_.open(path_); }
  // Appends a line, which ends with a line break. Returns the message of the first failure, else
  // "".
  std::string write(const std::string& line);
  // Retries the kept lines a last time; throws Error if they cannot be written.
  void finish();

 private:
  bool write_kept();

  const std::string path_;
  std::mutex mutex_;
  std::string kept_;  // lines not yet in the file
  std::string why_;   // reason of the last write error
  AppendFile file_;
  bool warned_ = false;
};

// Lines as KeptLines has them; the first failure is logged as a warning.
class LogFile : NonCopyable {
 public:
  // Reads the existing file; throws Error if that fails. Writes nothing.
  explicit LogFile(std::string path);

  // Removes the lines after `step`, and its evaluation unless it is `evaluated`, which will be
  // logged again, and opens the file. Damaged lines are moved to PATH.damaged with a warning.
  void start(int64_t step, bool evaluated);
  void write(const std::string& line);
  void finish() { lines_.finish(); }

 private:
  const std::string path_;
  std::string before_;  // contents of the existing file
  KeptLines lines_{path_};
};

}  // namespace cohort
