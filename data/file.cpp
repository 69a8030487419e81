// Whole-file reading with the system's reason in every error.
#include "data/file.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>

#include "core/check.h"

namespace cohort {

std::string read_input_file(const std::string& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored))
    throw InputError(str(path, ": is a folder; hint: name the file in it"));
  const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "rb"), std::fclose);
  if (!file)
    throw InputError(str(path, ": cannot be opened: ", std::strerror(errno),
                         "; hint: relative paths start at the current folder"));
  std::string text;
  char block[1 << 16];
  while (const size_t n = std::fread(block, 1, sizeof block, file.get())) text.append(block, n);
  if (std::ferror(file.get()))
    throw InputError(str(path, ": cannot be read: ", std::strerror(errno)));
  return text;
}

}  // namespace cohort
