// Fault injection: a library to preload into a program under test, where selected calls of the C
// library fail as on a full or broken disk.
//
//   COHORT_FAULT=CALL|PATH|ERROR|PASS|FAIL
//
// Applies to calls of CALL ("*": all functions below) with a path that contains PATH: the first
// PASS succeed, the next FAIL set errno to ERROR, and the rest succeed. ERROR 0: read(), pread()
// and write() transfer half, statvfs() reports no free space. ERROR -1: the process is killed;
// -2: the call never returns; -3: it never returns, and computes; -1000 or less: it takes -ERROR
// milliseconds, and succeeds. A close() that fails still closes.
//
//   COHORT_FAULT_LOG=FILE
//
// receives a line "CALL PATH" for each failed call; if FAIL is 0, for each matching call.
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>

namespace {

struct Fault {
  std::string call, path;
  int error = 0, pass = 0, fail = 0;
  const char* log = std::getenv("COHORT_FAULT_LOG");
  Fault() {
    const char* text = std::getenv("COHORT_FAULT");
    std::istringstream in(text != nullptr ? text : "");
    std::getline(in, call, '|');
    std::getline(in, path, '|');
    char bar;
    in >> error >> bar >> pass >> bar >> fail;
  }
};

const Fault& fault() {
  static const Fault instance;
  return instance;
}

// Uses system calls, which the functions below do not intercept.
void log_call(const std::string& line) {
  if (fault().log == nullptr) return;
  const long fd =
      syscall(SYS_openat, AT_FDCWD, fault().log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  syscall(SYS_write, fd, line.data(), line.size());
  syscall(SYS_close, fd);
}

bool fails(const std::string& call, const std::string& path) {
  static std::atomic<int> count{0};
  if (call != fault().call && fault().call != "*") return false;
  if (path.find(fault().path) == std::string::npos) return false;
  const int number = count++;
  const bool hit = number >= fault().pass && number - fault().pass < fault().fail;
  if (hit || fault().fail == 0) {
    const int saved = errno;
    log_call(call + " " + path + "\n");
    errno = saved;
  }
  if (!hit) return false;
  if (fault().error == -1) kill(getpid(), SIGKILL);
  if (fault().error == -2)
    for (;;) pause();
  if (fault().error == -3)
    for (std::atomic<int> forever{1}; forever != 0;) continue;
  if (fault().error <= -1000) {
    const int saved = errno;
    usleep(static_cast<unsigned>(-fault().error) * 1000);
    errno = saved;
    return false;
  }
  errno = fault().error;
  return true;
}

bool fails(const char* call, int fd) {
  if (call != fault().call && fault().call != "*") return false;
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  char path[4096] = "";
  const int saved = errno;
  if (syscall(SYS_readlink, link.c_str(), path, sizeof path - 1) < 0) path[0] = '\0';
  errno = saved;
  return fails(std::string(call), std::string(path));
}

// Also sets the stream's error flag, which ferror() reads.
bool fails(const char* call, FILE* stream) {
  if (stream == nullptr || !fails(call, fileno(stream))) return false;
  stream->_flags |= _IO_ERR_SEEN;
  return true;
}

// Overload for a name relative to a directory.
bool fails(const char* call, int dir, const char* name) {
  if (call != fault().call && fault().call != "*") return false;
  return dir == AT_FDCWD || name[0] == '/' ? fails(std::string(call), std::string(name))
                                           : fails(call, dir);
}

template <class Function>
Function* next(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

#define COHORT_NEXT(name) next(&name, #name)

extern "C" {

DIR* opendir(const char* path) {
  return fails("opendir", std::string(path)) ? nullptr : COHORT_NEXT(opendir)(path);
}

dirent* readdir(DIR* dir) {
  return fails("readdir", dirfd(dir)) ? nullptr : COHORT_NEXT(readdir)(dir);
}

int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const auto mode = (flags & O_CREAT) != 0 ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  return fails("open", std::string(path)) ? -1 : COHORT_NEXT(open)(path, flags, mode);
}

int openat(int dir, const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const auto mode = (flags & O_CREAT) != 0 ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  return fails("openat", dir, path) ? -1 : COHORT_NEXT(openat)(dir, path, flags, mode);
}

FILE* fopen(const char* path, const char* mode) {
  return fails("fopen", std::string(path)) ? nullptr : COHORT_NEXT(fopen)(path, mode);
}

FILE* fopen64(const char* path, const char* mode) {
  return fails("fopen", std::string(path)) ? nullptr : COHORT_NEXT(fopen64)(path, mode);
}

ssize_t read(int fd, void* to, size_t size) {
  if (!fails("read", fd)) return COHORT_NEXT(read)(fd, to, size);
  return errno != 0 ? -1 : COHORT_NEXT(read)(fd, to, (size + 1) / 2);
}

ssize_t pread(int fd, void* to, size_t size, off_t at) {
  if (!fails("pread", fd)) return COHORT_NEXT(pread)(fd, to, size, at);
  return errno != 0 ? -1 : COHORT_NEXT(pread)(fd, to, (size + 1) / 2, at);
}

size_t fread(void* to, size_t size, size_t count, FILE* stream) {
  return fails("fread", stream) ? 0 : COHORT_NEXT(fread)(to, size, count, stream);
}

ssize_t write(int fd, const void* from, size_t size) {
  if (!fails("write", fd)) return COHORT_NEXT(write)(fd, from, size);
  return errno != 0 ? -1 : COHORT_NEXT(write)(fd, from, (size + 1) / 2);
}

size_t fwrite(const void* from, size_t size, size_t count, FILE* stream) {
  return fails("fwrite", stream) ? 0 : COHORT_NEXT(fwrite)(from, size, count, stream);
}

int fflush(FILE* stream) {
  return fails("fflush", stream) ? EOF : COHORT_NEXT(fflush)(stream);
}

int close(int fd) {
  const bool failed = fails("close", fd);
  const int error = errno, result = COHORT_NEXT(close)(fd);
  if (failed) errno = error;
  return failed ? -1 : result;
}

int fsync(int fd) {
  return fails("fsync", fd) ? -1 : COHORT_NEXT(fsync)(fd);
}

int ftruncate(int fd, off_t size) noexcept {
  return fails("ftruncate", fd) ? -1 : COHORT_NEXT(ftruncate)(fd, size);
}

off_t lseek(int fd, off_t offset, int whence) noexcept {
  return fails("lseek", fd) ? -1 : COHORT_NEXT(lseek)(fd, offset, whence);
}

void* mmap(void* at, size_t size, int protection, int flags, int fd, off_t offset) noexcept {
  return fd >= 0 && fails("mmap", fd) ? MAP_FAILED
                                      : COHORT_NEXT(mmap)(at, size, protection, flags, fd, offset);
}

int flock(int fd, int operation) noexcept {
  using Flock = int(int, int);  // there is also a struct of this name
  return fails("flock", fd) ? -1 : next<Flock>(nullptr, "flock")(fd, operation);
}

int mkdir(const char* path, mode_t mode) noexcept {
  return fails("mkdir", std::string(path)) ? -1 : COHORT_NEXT(mkdir)(path, mode);
}

int unlinkat(int dir, const char* name, int flags) noexcept {
  return fails("unlinkat", dir, name) ? -1 : COHORT_NEXT(unlinkat)(dir, name, flags);
}

int symlink(const char* to, const char* path) noexcept {
  return fails("symlink", std::string(path)) ? -1 : COHORT_NEXT(symlink)(to, path);
}

ssize_t readlink(const char* path, char* to, size_t size) noexcept {
  return fails("readlink", std::string(path)) ? -1 : COHORT_NEXT(readlink)(path, to, size);
}

int rename(const char* from, const char* to) noexcept {
  return fails("rename", std::string(from) + " " + to) ? -1 : COHORT_NEXT(rename)(from, to);
}

int stat(const char* path, struct stat* to) noexcept {
  using Stat = int(const char*, struct stat*);
  return fails("stat", std::string(path)) ? -1 : next<Stat>(nullptr, "stat")(path, to);
}

int lstat(const char* path, struct stat* to) noexcept {
  return fails("lstat", std::string(path)) ? -1 : COHORT_NEXT(lstat)(path, to);
}

int statvfs(const char* path, struct statvfs* to) noexcept {
  using Statvfs = int(const char*, struct statvfs*);
  const bool failed = fails("statvfs", std::string(path));
  const int error = errno, result = next<Statvfs>(nullptr, "statvfs")(path, to);
  if (failed && error == 0) to->f_bavail = 0;
  return failed && error != 0 ? -1 : result;
}

int fstat(int fd, struct stat* to) noexcept {
  return fails("fstat", fd) ? -1 : COHORT_NEXT(fstat)(fd, to);
}

}  // extern "C"
