#include "sys/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#define XXH_VECTOR XXH_SSE2  // g++ 12 warns inside its own AVX-512 intrinsics otherwise
#include <xxhash.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>
#include <thread>

#include "core/progress.h"
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
void read_whole(const std::string& path, const std::function<void(std::string_view)>& use,
                int64_t max_bytes = INT64_MAX) {
  errno = read_chunks(path, use, max_bytes);
  if (errno == 0) return;
  if (does_not_exist()) throw_errno<InputError>("cannot read ", path);
  fail_to_read(path);
}

// The place to which bytes for a path go, links followed.
struct Destination {
  std::string path;
  std::string refusal;  // the reason why nothing can be written there
  bool stream = false;  // a character device or a FIFO
  mode_t mode = 0644;   // permissions of the file
  bool is_new = true;
};

// The file that a link names, which does not exist yet; the path itself if it is no link.
std::string end_of_links(fs::path path) {
  constexpr int kMaxLinks = 40;
  std::error_code error;
  for (int i = 0; i < kMaxLinks && fs::is_symlink(path, error); ++i)
    path = path.parent_path() / fs::read_symlink(path, error);
  return path.string();
}

Destination destination(const std::string& path) {
  Destination to{.path = path};
  struct stat status;
  if (::stat(path.c_str(), &status) != 0) {
    if (errno == ENOENT)
      to.path = end_of_links(path);
    else
      to.refusal = system_reason();
    return to;
  }
  to.is_new = false;
  to.mode = status.st_mode & 0777;
  to.stream = S_ISCHR(status.st_mode) || S_ISFIFO(status.st_mode);
  std::error_code error;
  if (S_ISREG(status.st_mode))
    to.path = fs::canonical(path, error).string();
  else if (!to.stream)
    to.refusal = str("it is ", type_name(status.st_mode));
  if (error) to.refusal = error.message();
  return to;
}

Descriptor open_stream(const std::string& path) {
  const auto flags = O_WRONLY | O_CLOEXEC | O_NOCTTY;  // waits for the reader of a FIFO
  return Descriptor(static_cast<int>(TEMP_FAILURE_RETRY(::open(path.c_str(), flags))));
}

// Temporary names of a target are PREFIX and 16 random hex digits, in its folder.
std::string temporary_prefix(const fs::path& target) {
  constexpr size_t kMaxKept = 200;  // bytes; names have at most 255
  return target.filename().string().substr(0, kMaxKept) + ".tmp-";
}

std::string temporary_name(const fs::path& target) {
  std::random_device random;
  return fs::path(target).replace_filename(temporary_prefix(target) +
                                           hex(uint64_t{random()} << 32 | random()));
}

// Removes the temporary files, or folders, that killed processes left behind: no process holds
// their lock.
void remove_stale(const fs::path& target, mode_t type = S_IFREG) {
  const std::string prefix = temporary_prefix(target);
  std::error_code error;
  const fs::path folder = target.parent_path();
  for (fs::directory_iterator it(folder.empty() ? "." : folder, error), end; !error && it != end;
       it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.size() != prefix.size() + 16 || !name.starts_with(prefix) ||
        name.find_first_not_of("0123456789abcdef", prefix.size()) != name.npos)
      continue;
    const Descriptor file(
        ::open(it->path().c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    struct stat status;
    if (!file.is_open() || ::fstat(file.get(), &status) != 0 || (status.st_mode & S_IFMT) != type ||
        ::flock(file.get(), LOCK_EX | LOCK_NB) != 0)
      continue;
    std::error_code failure;
    if (type == S_IFREG)
      ::unlink(it->path().c_str());
    else
      fs::remove_all(it->path(), failure);
  }
}

}  // namespace

DurableFile::DurableFile(std::string path, Describe describe)
    : path_(std::move(path)), describe_(describe) {
  const Destination to = destination(path_);
  if (!to.refusal.empty()) fail(Step::kCreate, to.refusal);
  if (to.stream) {
    file_ = open_stream(path_);
    if (!file_.is_open()) fail(Step::kCreate);
    return;
  }
  remove_stale(to.path);
  // Another process may have taken the new file for a stale one: tries again a few times.
  struct stat status {};
  for (int attempt = 0; attempt < 4 && status.st_nlink == 0; ++attempt) {
    if (!temporary_.empty()) ::unlink(temporary_.c_str());
    temporary_ = temporary_name(to.path);
    file_ = Descriptor(
        ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, to.mode));
    if (!file_.is_open()) fail(Step::kCreate);
    if (::flock(file_.get(), LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK)
      ::fstat(file_.get(), &status);
  }
  target_ = to.path;
  if (!to.is_new) ::fchmod(file_.get(), to.mode);  // whatever the umask is
}

DurableFile::~DurableFile() {
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void DurableFile::fail(Step step, const std::string& reason) const {
  if (describe_ != nullptr) throw Error(describe_(step, path_, reason));
  throw Error(str("cannot ", step == Step::kCreate ? "create " : "write ", path_, ": ", reason));
}

void DurableFile::write(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(file_.get(), bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail(Step::kWrite);
    note_progress();
    bytes.remove_prefix(static_cast<size_t>(n));
  }
}

void DurableFile::rewind() {
  if (::lseek(file_.get(), 0, SEEK_SET) != 0) fail(Step::kWrite);
}

void DurableFile::start_flush() const {
  ::sync_file_range(file_.get(), 0, 0, SYNC_FILE_RANGE_WRITE);
}

void DurableFile::finish() {
  if (!temporary_.empty() && ::fsync(file_.get()) != 0) fail(Step::kFlush);
  if (!file_.close()) fail(Step::kClose);
  if (temporary_.empty()) return;
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail(Step::kClose);
  temporary_.clear();
}

NewFolder::NewFolder(const std::string& path) {
  std::error_code error;
  fs::path at = fs::absolute(path, error);
  if (!error) at = fs::weakly_canonical(at, error);
  if (error) throw InputError(str("'", path, "' cannot be a new folder: ", error.message()));
  if (!at.has_filename()) at = at.parent_path();
  const bool exists = path_exists(at);
  if (exists && !is_own_directory(at))
    throw InputError(str(path, ": it is no folder; hint: name a new one"));
  if (!list_directory(at).empty())
    throw InputError(str(path, ": the folder is not empty; hint: name a new one"));
  for (; !path_exists(at.parent_path()); at = at.parent_path())
    inner_ = str("/", at.filename().string(), inner_);
  target_ = at;
}

NewFolder::~NewFolder() {
  std::error_code error;
  if (!temporary_.empty()) fs::remove_all(temporary_, error);
}

std::string NewFolder::create() {
  remove_stale(target_, S_IFDIR);
  temporary_ = temporary_name(target_);
  make_directory(temporary_ + inner_);
  lock_ = Descriptor(::open(temporary_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (lock_.is_open()) ::flock(lock_.get(), LOCK_EX | LOCK_NB);
  return temporary_ + inner_;
}

void NewFolder::finish() {
  for (std::string at = temporary_ + inner_; at.size() >= temporary_.size();
       at = fs::path(at).parent_path())
    sync_directory(at);
  rename_entry(temporary_, target_);
  temporary_.clear();
  sync_directory(fs::path(target_).parent_path());
}

std::string AppendFile::open(const std::string& path) {
  const Destination to = destination(path);
  if (!to.refusal.empty()) return to.refusal;
  file_ = to.stream
              ? open_stream(path)
              : Descriptor(::open(to.path.c_str(),
                                  O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, 0644));
  return is_open() ? "" : system_reason();
}

std::string AppendFile::append(std::string_view piece) {
  if (torn_at_.has_value() && ::ftruncate(file_.get(), *torn_at_) != 0) return system_reason();
  torn_at_.reset();
  const off_t end = ::lseek(file_.get(), 0, SEEK_END);
  const ssize_t n = TEMP_FAILURE_RETRY(::write(file_.get(), piece.data(), piece.size()));
  if (n == static_cast<ssize_t>(piece.size())) return "";
  const std::string why =
      n < 0 ? system_reason() : str("only ", n, " of ", piece.size(), " bytes were written");
  if (n > 0 && end >= 0 && ::ftruncate(file_.get(), end) != 0) torn_at_ = end;
  return why;
}

FileLock::FileLock(const std::string& path)
    : file_(::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC | O_NOCTTY, 0644)) {}

bool FileLock::try_lock() const {
  return ::flock(file_.get(), LOCK_EX | LOCK_NB) == 0;
}

bool FileLock::lock() const {
  while (!try_lock()) {
    if (errno != EWOULDBLOCK && errno != EINTR) return false;
    note_progress();  // the holder has to make some, not who waits for it
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return true;
}

bool FileLock::exists() const {
  struct stat status;
  return ::fstat(file_.get(), &status) == 0 && status.st_nlink > 0;
}

void write_file_durable(const std::string& path, std::string_view text) {
  DurableFile file(path);
  file.write(text);
  file.finish();
}

void replace_file(const std::string& path, std::string_view text) {
  write_file_durable(path, text);
  std::error_code error;
  const fs::path target = fs::canonical(path, error);
  if (!error && fs::is_regular_file(target, error)) sync_directory(target.parent_path().string());
}

void make_directory(const std::string& path) {
  constexpr int kAttempts = 3;  // another process may remove a parent that was just made
  std::error_code error;
  fs::create_directories(path, error);
  for (int i = 1; i < kAttempts && error == std::errc::no_such_file_or_directory; ++i)
    fs::create_directories(path, error);
  if (error) throw Error(str("cannot create the directory ", path, ": ", error.message()));
}

void rename_entry(const std::string& from, const std::string& to) {
  std::error_code error;
  fs::rename(from, to, error);
  if (error) throw Error(str("cannot rename ", from, " to ", to, ": ", error.message()));
}

std::string read_text_file(const std::string& path, int64_t max_bytes) {
  std::string text;
  read_whole(
      path, [&](std::string_view chunk) { text += chunk; }, max_bytes);
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
  const Descriptor file = open_regular(path);
  struct stat status;
  if (file.is_open() && ::fstat(file.get(), &status) == 0) return status.st_size;
  if (!does_not_exist()) fail_to_read(path);
  return -1;
}

int64_t free_disk_bytes(const std::string& path) {
  std::error_code error;
  fs::path at = fs::absolute(path, error);
  while (!fs::exists(at, error) && at.has_relative_path()) at = at.parent_path();
  struct statvfs status;
  if (::statvfs(at.c_str(), &status) != 0) return INT64_MAX;
  return static_cast<int64_t>(status.f_bavail) * static_cast<int64_t>(status.f_frsize);
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
