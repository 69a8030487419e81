// Opening and reading files with the system's reason in every error.
#include "sys/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

namespace cohort {

std::ifstream open_input_file(const std::string& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored))
    throw InputError(str(path, ": is a folder; hint: name the file in it"));
  std::ifstream file(path, std::ios::binary);
  if (!file)
    throw InputError(str(path, ": cannot be opened: ", system_reason(), "; hint: check the path"));
  return file;
}

void check_read(const std::ifstream& file, const std::string& path) {
  if (file.bad()) throw_errno<InputError>(path, ": cannot be read");
}

InputFile::InputFile(std::string path) : path_(std::move(path)) {
  open_input_file(path_);  // gives the more specific errors
  file_ = Descriptor(::open(path_.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status;
  if (!file_.is_open() || ::fstat(file_.get(), &status) != 0)
    throw_errno<InputError>(path_, ": cannot be opened");
  size_ = status.st_size;
}

std::string InputFile::read(int64_t begin, int64_t end) const {
  std::string text(static_cast<size_t>(end - begin), '\0');
  for (size_t done = 0; done < text.size();) {
    const ssize_t n = ::pread(file_.get(), text.data() + done, text.size() - done,
                              begin + static_cast<int64_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0)
      throw InputError(str(path_, ": cannot be read: ",
                           n < 0 ? system_reason() : "it has become shorter; hint: restore it"));
    done += static_cast<size_t>(n);
  }
  return text;
}

void InputFile::will_read(int64_t begin, int64_t end) const {
  ::posix_fadvise(file_.get(), begin, end - begin, POSIX_FADV_WILLNEED);
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
  open_input_file(path);  // gives the more specific errors
  std::string text;
  errno = read_chunks(path, [&](std::string_view chunk) { text += chunk; });
  if (errno != 0) throw_errno<InputError>(path, ": cannot be read");
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
