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
#include <filesystem>
#include <functional>
#include <memory>

#include "sys/input_file.h"

namespace cohort {
namespace {

namespace fs = std::filesystem;

bool does_not_exist() {
  return errno == ENOENT || errno == ENOTDIR || errno == ENAMETOOLONG;
}

// Any failure other than that the entry does not exist.
[[noreturn]] void fail_to_read(const std::string& path) {
  throw Error(str("cannot read ", path, ": ", system_reason(),
                  "; hint: nothing was changed; make it readable and start again"));
}

// read_chunks(), with errors as read_text_file() has them.
void read_whole(const std::string& path, const std::function<void(std::string_view)>& use) {
  errno = read_chunks(path, use);
  if (errno == 0) return;
  if (does_not_exist() || errno == EISDIR) throw_errno<InputError>("cannot read ", path);
  fail_to_read(path);
}

}  // namespace

DurableFile::DurableFile(std::string path, Describe describe)
    : path_(std::move(path)),
      describe_(describe),
      file_(::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644)) {
  if (!file_.is_open()) fail(Step::kCreate);
}

void DurableFile::fail(Step step) const {
  const int error = errno;
  if (describe_ != nullptr) throw Error(describe_(step, path_, system_reason(error)));
  throw Error(str("cannot ", step == Step::kCreate ? "create " : "write ", path_, ": ",
                  system_reason(error)));
}

void DurableFile::write(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(file_.get(), bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail(Step::kWrite);
    bytes.remove_prefix(static_cast<size_t>(n));
  }
}

void DurableFile::rewind() {
  if (::lseek(file_.get(), 0, SEEK_SET) != 0) fail(Step::kWrite);
}

void DurableFile::start_flush() const {
  ::sync_file_range(file_.get(), 0, 0, SYNC_FILE_RANGE_WRITE);
}

void DurableFile::finish(const std::string& name) {
  if (::fsync(file_.get()) != 0) fail(Step::kFlush);
  if (!file_.close()) fail(Step::kClose);
  if (name.empty()) return;
  rename_entry(path_, name);
  sync_directory(fs::path(name).parent_path().string());
}

std::string AppendFile::open(const std::string& path) {
  file_ = Descriptor(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  return is_open() ? "" : system_reason();
}

std::string AppendFile::append(std::string_view piece) {
  if (torn_at_.has_value() && ::ftruncate(file_.get(), *torn_at_) != 0) return system_reason();
  torn_at_.reset();
  const off_t end = ::lseek(file_.get(), 0, SEEK_END);
  ssize_t n;
  do n = ::write(file_.get(), piece.data(), piece.size());
  while (n < 0 && errno == EINTR);
  if (n == static_cast<ssize_t>(piece.size())) return "";
  const std::string why =
      n < 0 ? system_reason() : str("only ", n, " of ", piece.size(), " bytes were written");
  if (n > 0 && ::ftruncate(file_.get(), end) != 0) torn_at_ = end;
  return why;
}

FileLock::FileLock(const std::string& path)
    : file_(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644)) {}

bool FileLock::try_lock() const {
  return ::flock(file_.get(), LOCK_EX | LOCK_NB) == 0;
}

bool FileLock::lock() const {
  while (::flock(file_.get(), LOCK_EX) != 0)
    if (errno != EINTR) return false;
  return true;
}

void write_file_durable(const std::string& path, std::string_view text) {
  DurableFile file(path);
  file.write(text);
  file.finish();
}

void replace_file(const std::string& path, std::string_view text) {
  DurableFile file(path + ".tmp");
  file.write(text);
  file.finish(path);
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
  const Descriptor directory(
      ::open(path.empty() ? "." : path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!directory.is_open()) throw_errno("cannot open directory ", path);
  // EINVAL: the file system has nothing to flush for a directory.
  if (::fsync(directory.get()) != 0 && errno != EINVAL)
    throw_errno("cannot flush the directory ", path);
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

}  // namespace cohort
