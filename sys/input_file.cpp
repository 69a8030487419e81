// Opening and reading files with the system's reason in every error.
#include "sys/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "core/progress.h"
#include "sys/files.h"

namespace cohort {

const char* type_name(unsigned mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISCHR(mode)) return "a character device";
  if (S_ISBLK(mode)) return "a block device";
  return S_ISSOCK(mode) ? "a socket" : "a regular file";
}

Descriptor open_regular(const std::string& path, Streams streams) {
  struct stat status;
  const bool inherited =
      streams == Streams::kInherited &&
      (path.starts_with("/dev/fd/") || path.starts_with("/proc/self/fd/") || path == "/dev/stdin");
  const auto check = [&] {
    if (S_ISDIR(status.st_mode))
      throw InputError(str(path, ": is a folder; hint: name the file in it"));
    if (!S_ISREG(status.st_mode) && (!inherited || S_ISBLK(status.st_mode)))
      throw InputError(str(path, ": is not a regular file but ", type_name(status.st_mode),
                           "; hint: save what it holds as a file, which may be read repeatedly, ",
                           "and name that"));
  };
  // Checked before, because opening a device may have effects, and after, because a name may
  // change.
  if (::stat(path.c_str(), &status) != 0) return Descriptor();
  check();
  Descriptor file(::open(
      path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | (S_ISREG(status.st_mode) ? O_NONBLOCK : 0)));
  if (!file.is_open() || ::fstat(file.get(), &status) != 0) return Descriptor();
  check();
  return file;
}

Descriptor open_input_file(const std::string& path, Streams streams) {
  Descriptor file = open_regular(path, streams);
  if (!file.is_open())
    throw InputError(str(path, ": cannot be opened: ", system_reason(), "; hint: check the path"));
  return file;
}

InputFile::InputFile(std::string path) : path_(std::move(path)), file_(open_input_file(path_)) {
  struct stat status;
  if (::fstat(file_.get(), &status) != 0) throw_errno<InputError>(path_, ": cannot be opened");
  size_ = status.st_size;
}

std::string InputFile::read(int64_t begin, int64_t end) const {
  if (end - begin > kMaxText)
    throw InputError(str(path_, ": has a line of more than ", kMaxText, " bytes; hint: split it"));
  std::string text(static_cast<size_t>(end - begin), '\0');
  read_to(text.data(), begin, end - begin);
  return text;
}

void InputFile::read_to(void* out, int64_t begin, int64_t size) const {
  for (int64_t done = 0; done < size;) {
    const ssize_t n = ::pread(file_.get(), static_cast<char*>(out) + done,
                              static_cast<size_t>(size - done), begin + done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0)
      throw InputError(str(path_, ": cannot be read: ",
                           n < 0 ? system_reason() : "it has become shorter; hint: restore it"));
    note_progress();
    done += n;
  }
}

void InputFile::will_read(int64_t begin, int64_t end) const {
  ::posix_fadvise(file_.get(), begin, end - begin, POSIX_FADV_WILLNEED);
}

namespace {

// read_chunks() of an open file.
int read_all(const Descriptor& file, const std::string& path, int64_t max_bytes,
             const std::function<void(std::string_view)>& use) {
  struct stat status {};
  const int64_t bytes = ::fstat(file.get(), &status) == 0 ? status.st_size : 0;
  std::vector<char> buffer(1 << 18);
  for (ssize_t n = 1, done = 0; n != 0;) {
    if (std::max(bytes, done) > max_bytes)
      throw InputError(str(path, ": has more than ", max_bytes, " bytes; hint: check the path"));
    n = ::read(file.get(), buffer.data(), buffer.size());
    if (n > 0) use({buffer.data(), static_cast<size_t>(n)});
    if (n < 0 && errno != EINTR) return errno;
    done += std::max<ssize_t>(n, 0);
    note_progress();
  }
  return 0;
}

}  // namespace

int read_chunks(const std::string& path, const std::function<void(std::string_view)>& use,
                int64_t max_bytes) {
  const Descriptor file = open_regular(path, Streams::kInherited);
  return file.is_open() ? read_all(file, path, max_bytes, use) : errno;
}

std::string read_input_file(const std::string& path) {
  const Descriptor file = open_input_file(path, Streams::kInherited);
  std::string text;
  errno = read_all(file, path, kMaxText, [&](std::string_view chunk) { text += chunk; });
  if (errno != 0) throw_errno<InputError>(path, ": cannot be read");
  return text;
}

NamedFiles read_files(const std::string& folder, std::span<const char* const> names) {
  NamedFiles files;
  for (const char* name : names)
    if (const std::string path = folder + "/" + name; path_exists(path))
      files.emplace_back(name, read_input_file(path));
  return files;
}

const std::string* find_file(const NamedFiles& files, std::string_view name) {
  for (const auto& [known, content] : files)
    if (known == name) return &content;
  return nullptr;
}

}  // namespace cohort
