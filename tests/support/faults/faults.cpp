// A library to preload into a program under test: chosen calls of the C library fail, as on a full
// or broken disk.
//
//   COHORT_FAULT=CALL|PATH|ERROR|PASS|FAIL
//
// Of the calls CALL for a path that contains PATH the first PASS succeed, the next FAIL set errno
// to ERROR, and all others succeed. ERROR 0: write() writes half. ERROR -1: the process is killed
// there.
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
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
  Fault() {
    const char* text = std::getenv("COHORT_FAULT");
    std::istringstream in(text != nullptr ? text : "");
    std::getline(in, call, '|');
    std::getline(in, path, '|');
    char bar;
    in >> error >> bar >> pass >> bar >> fail;
  }
};

bool fails(const std::string& call, const std::string& path) {
  static const Fault fault;
  static std::atomic<int> count{0};
  if (call != fault.call || path.find(fault.path) == std::string::npos) return false;
  const int number = count++;
  if (number < fault.pass || number >= fault.pass + fault.fail) return false;
  if (fault.error < 0) kill(getpid(), SIGKILL);
  errno = fault.error;
  return true;
}

bool fails(const std::string& call, int fd) {
  char path[4096] = "";
  const int saved = errno;
  if (readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), path, sizeof path - 1) < 0)
    path[0] = '\0';
  errno = saved;
  return fails(call, std::string(path));
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

ssize_t read(int fd, void* to, size_t size) {
  return fails("read", fd) ? -1 : COHORT_NEXT(read)(fd, to, size);
}

ssize_t write(int fd, const void* from, size_t size) {
  if (!fails("write", fd)) return COHORT_NEXT(write)(fd, from, size);
  return errno != 0 ? -1 : COHORT_NEXT(write)(fd, from, size / 2);
}

int fsync(int fd) {
  return fails("fsync", fd) ? -1 : COHORT_NEXT(fsync)(fd);
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

}  // extern "C"
