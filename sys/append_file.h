// A file to which pieces are appended atomically: lines of a log, records of an event file.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "sys/descriptor.h"

namespace cohort {

class AppendFile {
 public:
  // Opens or creates a file. Returns "", or the reason of the failure.
  std::string open(const std::string& path);
  bool is_open() const { return fd_.is_open(); }
  // Returns "" if the whole piece was appended, else the reason of the failure. A partly written
  // piece is truncated again, at the latest before the next one.
  std::string append(std::string_view piece);

 private:
  Descriptor fd_;
  std::optional<int64_t> torn_at_;  // offset of a partial piece that could not be truncated
};

}  // namespace cohort
