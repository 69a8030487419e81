#include "sys/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#define XXH_VECTOR XXH_SSE2  // g++ 12 warns inside its own AVX-512 intrinsics otherwise
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "core/check.h"
#include "sys/descriptor.h"
#include "sys/input_file.h"

namespace cohort {
namespace {

namespace fs = std::filesystem;

std::string reason() {
  return std::strerror(errno);
}

bool does_not_exist() {
  return errno == ENOENT || errno == ENOTDIR || errno == ENAMETOOLONG;
}

// Any failure other than that the entry does not exist.
[[noreturn]] void fail_to_read(const std::string& path) {
  throw Error(str("cannot read ", path, ": ", reason(),
                  "; hint: nothing was changed; make it readable and start again"));
}

// read_chunks(), with errors as read_text_file() has them.
void read_whole(const std::string& path, const std::function<void(std::string_view)>& use) {
  errno = read_chunks(path, use);
  if (errno == 0) return;
  if (does_not_exist() || errno == EISDIR)
    throw InputError(str("cannot read ", path, ": ", reason()));
  fail_to_read(path);
}

}  // namespace

void write_file_durable(const std::string& path, const std::string& text) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) throw Error(str("cannot create ", path, ": ", reason()));
  size_t done = 0;
  bool ok = true;
  while (ok && done < text.size()) {
    const ssize_t n = ::write(fd, text.data() + done, text.size() - done);
    if (n > 0) done += static_cast<size_t>(n);
    ok = n > 0 || errno == EINTR;
  }
  ok = ok && ::fsync(fd) == 0;
  std::string why = reason();
  if (::close(fd) != 0 && std::exchange(ok, false)) why = reason();
  if (!ok) throw Error(str("cannot write ", path, ": ", why));
}

void make_directory(const std::string& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (error) throw Error(str("cannot create the directory ", path, ": ", error.message()));
}

void rename_entry(const std::string& from, const std::string& to) {
  std::error_code error;
  fs::rename(from, to, error);
  if (error) throw Error(str("cannot rename ", from, " to ", to, ": ", error.message()));
}

void replace_file(const std::string& path, const std::string& text) {
  const std::string temporary = path + ".tmp";
  write_file_durable(temporary, text);
  rename_entry(temporary, path);
  sync_directory(fs::path(path).parent_path().string());
}

std::string read_text_file(const std::string& path) {
  std::string text;
  read_whole(path, [&](std::string_view chunk) { text += chunk; });
  return text;
}

std::vector<std::string> list_directory(const std::string& path) {
  std::vector<std::string> names;
  const std::unique_ptr<DIR, int (*)(DIR*)> dir(::opendir(path.c_str()), ::closedir);
  if (dir == nullptr) {
    if (!does_not_exist()) fail_to_read(path);
    return names;
  }
  for (errno = 0; const dirent* entry = ::readdir(dir.get()); errno = 0) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  if (errno != 0) fail_to_read(path);
  std::sort(names.begin(), names.end());
  return names;
}

bool path_exists(const std::string& path) {
  struct stat status;
  if (::stat(path.c_str(), &status) == 0) return true;
  if (!does_not_exist()) fail_to_read(path);
  return false;
}

bool is_own_directory(const std::string& path) {
  struct stat status;
  if (::lstat(path.c_str(), &status) == 0) return S_ISDIR(status.st_mode);
  if (!does_not_exist()) fail_to_read(path);
  return false;
}

int64_t readable_size(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status;
  if (file.get() >= 0 && ::fstat(file.get(), &status) == 0) return status.st_size;
  if (!does_not_exist()) fail_to_read(path);
  return -1;
}

void sync_directory(const std::string& path) {
  const int fd = ::open(path.empty() ? "." : path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) throw Error(str("cannot open directory ", path, ": ", reason()));
  // EINVAL: the file system has nothing to flush for a directory.
  const bool ok = ::fsync(fd) == 0 || errno == EINVAL;
  const std::string why = reason();
  ::close(fd);
  if (!ok) throw Error(str("cannot flush the directory ", path, ": ", why));
}

std::string file_checksum(const std::string& path) {
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(),
                                                                       XXH3_freeState);
  XXH3_64bits_reset(state.get());
  read_whole(path, [&](std::string_view chunk) {
    XXH3_64bits_update(state.get(), chunk.data(), chunk.size());
  });
  return hex(XXH3_64bits_digest(state.get()));
}

std::string hex(uint64_t checksum) {
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(checksum));
  return digits;
}

uint64_t checksum(std::string_view bytes, uint64_t before) {
  return XXH3_64bits_withSeed(bytes.data(), bytes.size(), before);
}

std::string create_run_directory(const std::string& wanted) {
  std::error_code error;
  fs::create_directories(fs::path(wanted).parent_path(), error);
  for (int i = 1; i < 100000 && !error; ++i) {
    const std::string path = i == 1 ? wanted : str(wanted, "-", i);
    if (fs::create_directory(path, error)) return path;
  }
  throw InputError(str("cannot create the run directory ", wanted, ": ", error.message(),
                       "; hint: set output_dir to a folder you may write to"));
}

RunLock::RunLock(const std::string& run_dir) {
  const std::string path = run_dir + "/.lock";
  fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd_ < 0) throw InputError(str("cannot create ", path, ": ", reason()));
  if (::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
    ::close(fd_);
    throw InputError(
        str("another process is using the run directory ", run_dir,
            "; hint: wait for it to end, or start a run of your own without --resume"));
  }
}

RunLock::~RunLock() {
  ::close(fd_);
}

}  // namespace cohort
