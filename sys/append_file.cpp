#include "sys/append_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/check.h"

namespace cohort {

std::string AppendFile::open(const std::string& path) {
  fd_ = Descriptor(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
  return is_open() ? "" : std::strerror(errno);
}

std::string AppendFile::append(std::string_view piece) {
  if (torn_at_.has_value() && ::ftruncate(fd_.get(), *torn_at_) != 0) return std::strerror(errno);
  torn_at_.reset();
  const off_t end = ::lseek(fd_.get(), 0, SEEK_END);
  ssize_t n;
  do n = ::write(fd_.get(), piece.data(), piece.size());
  while (n < 0 && errno == EINTR);
  if (n == static_cast<ssize_t>(piece.size())) return "";
  const std::string why =
      n < 0 ? std::strerror(errno) : str("only ", n, " of ", piece.size(), " bytes were written");
  if (n > 0 && ::ftruncate(fd_.get(), end) != 0) torn_at_ = end;
  return why;
}

}  // namespace cohort
