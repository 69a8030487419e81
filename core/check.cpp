#include "core/check.h"

#include <string_view>

namespace cohort {

std::string with_location(const std::string& message, const char* file, int line) {
  std::string_view path(file);
  // Build systems pass absolute paths; the last two components identify the file.
  const size_t last = path.rfind('/');
  if (last != std::string_view::npos && last > 0) {
    const size_t before = path.rfind('/', last - 1);
    if (before != std::string_view::npos) path.remove_prefix(before + 1);
  }
  return str(message, " (", path, ":", line, ")");
}

void throw_check_error(const char* file, int line, const std::string& message) {
  throw Error(with_location(message, file, line));
}

}  // namespace cohort
