// A file that grows by whole pieces: lines of a log, records of an event file.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/descriptor.h"

namespace cohort {

class AppendFile {
 public:
  // Opens a file, or makes it. Returns "", or the reason why it cannot.
  std::string open(const std::string& path);
  bool is_open() const { return fd_.is_open(); }
  // Returns "" once the piece is in the file, else why none of it is. What part of it was written
  // is cut away again, before the next piece at the latest.
  std::string append(std::string_view piece);

 private:
  Descriptor fd_;
  std::optional<int64_t> torn_at_;  // where part of a piece is, which could not be cut
};

}  // namespace cohort
