// Opening and reading files with the system's reason in every error.
#include "data/file.h"

#include <fcntl.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <vector>

#include "core/check.h"
#include "core/descriptor.h"

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

int read_chunks(const std::string& path, const std::function<void(std::string_view)>& use) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) return errno;
  std::vector<char> buffer(1 << 18);
  for (ssize_t n = 1; n > 0;) {
    n = ::read(file.get(), buffer.data(), buffer.size());
    if (n < 0) return errno;
    use({buffer.data(), static_cast<size_t>(n)});
  }
  return 0;
}

std::string read_input_file(const std::string& path) {
  open_input_file(path);  // says more about a path that is wrong
  std::string text;
  const int error = read_chunks(path, [&](std::string_view chunk) { text += chunk; });
  if (error != 0) throw InputError(str(path, ": cannot be read: ", std::strerror(error)));
  return text;
}

NamedFiles read_files(const std::string& folder, std::span<const char* const> names) {
  NamedFiles files;
  std::error_code ignored;
  for (const char* name : names) {
    const std::string path = folder + "/" + name;
    if (std::filesystem::exists(path, ignored)) files.emplace_back(name, read_input_file(path));
  }
  return files;
}

const std::string* find_file(const NamedFiles& files, std::string_view name) {
  for (const auto& [known, content] : files)
    if (known == name) return &content;
  return nullptr;
}

}  // namespace cohort
