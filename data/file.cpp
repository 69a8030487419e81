// Opening and reading files with the system's reason in every error.
#include "data/file.h"

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "core/check.h"

namespace cohort {

std::ifstream open_input_file(const std::string& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored))
    throw InputError(str(path, ": is a folder; hint: name the file in it"));
  std::ifstream file(path, std::ios::binary);
  if (!file)
    throw InputError(
        str(path, ": cannot be opened: ", std::strerror(errno), "; hint: check the path"));
  return file;
}

void check_read(const std::ifstream& file, const std::string& path) {
  if (file.bad()) throw InputError(str(path, ": cannot be read: ", std::strerror(errno)));
}

std::string read_input_file(const std::string& path) {
  std::ifstream file = open_input_file(path);
  std::string text, chunk(1 << 16, '\0');
  while (file.read(chunk.data(), static_cast<std::streamsize>(chunk.size())) || file.gcount() > 0)
    text.append(chunk, 0, static_cast<size_t>(file.gcount()));
  check_read(file, path);
  return text;
}

}  // namespace cohort
