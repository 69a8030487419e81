// metrics.jsonl and completions.jsonl: one JSON object per line, each with its "step".
#pragma once

#include <cstdint>
#include <string>

#include "trainers/append_file.h"

namespace cohort {

// A line is in the file whole or not at all. One that cannot be written is reported once, as a
// warning, kept, and tried again with the next one.
class LogFile {
 public:
  // Reads what an earlier start has written; throws Error if that cannot be done. Writes nothing.
  explicit LogFile(std::string path);
  ~LogFile();
  LogFile(const LogFile&) = delete;
  LogFile& operator=(const LogFile&) = delete;

  // Cuts the lines after `step`, which are written again, and opens the file. Damaged lines go to
  // PATH.damaged with a warning.
  void start(int64_t step);
  void write(const std::string& line);
  // Tries a last time to write what is kept; throws Error if it cannot.
  void finish();

 private:
  bool write_kept();

  const std::string path_;
  std::string before_;  // the file as it was found
  std::string kept_;    // lines that are not in the file
  std::string why_;     // the last one could not be written
  AppendFile file_;
  bool warned_ = false;
};

}  // namespace cohort
