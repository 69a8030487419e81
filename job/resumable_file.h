// A file of which a command appends a piece at a time, and which the same command continues after a
// kill. Beside DIR/NAME is DIR/.NAME.state: a line with the settings of the command, and for each
// piece, before it is written, a line with its end, the checksum up to there, and a state.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "config/visitor.h"
#include "core/non_copyable.h"
#include "sys/files.h"
#include "text/json.h"

namespace cohort {

class ResumableFile : NonCopyable {
 public:
  // Opens or creates the file for a command with these settings, and locks it. Removes a piece that
  // was partly written, and nothing else. Throws InputError, and changes nothing, if another
  // process or a command with other settings writes the file, if not all of its bytes are pieces of
  // this command, or if there is anything but a regular file.
  ResumableFile(const std::string& path, const ConfigFields& settings);

  // The state that append() was given with the last piece of the file; null: there is none.
  const Json& state() const { return state_; }
  // Appends a piece whole or not at all. `state` describes the file after it. Throws Error if it
  // cannot be written; the pieces before stay.
  void append(std::string_view piece, const Json& state);

 private:
  void resume(const std::string& settings);

  const std::string path_, state_path_;
  std::optional<FileLock> lock_;  // on the state
  AppendFile file_, lines_;       // lines_: of the state
  Json state_;
  int64_t size_ = 0;  // bytes of the pieces
  uint64_t sum_ = 0;  // their checksum, each with the one of the pieces before as its seed
};

}  // namespace cohort
