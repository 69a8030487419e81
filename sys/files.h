// File system steps that must not lose data: durable writes, appended pieces, atomic replacement,
// locks, directories and checksums.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/non_copyable.h"
#include "sys/descriptor.h"

namespace cohort {

// Replaces a file: its bytes are on disk once finish() has returned, and until then the path has
// what it had. Links are followed to their file, whose permissions are kept; the bytes for a
// character device or a FIFO are written to it as they come. A file that a killed process left
// behind is removed by the next write to its path. Every function throws Error if the system
// refuses a step; the constructor also for folders, block devices and sockets.
class DurableFile : NonCopyable {
 public:
  enum class Step { kCreate, kWrite, kFlush, kClose };
  // Returns the message for a failed step.
  using Describe = std::string (*)(Step step, const std::string& path, const std::string& reason);

  // Default messages: "cannot create PATH: REASON" and "cannot write PATH: REASON".
  explicit DurableFile(std::string path, Describe describe = nullptr);
  ~DurableFile();
  void write(std::string_view bytes);
  // The next write() overwrites the first bytes of the file.
  void rewind();
  // Hint to the system to start writing to disk, so that finish() has little left to do.
  void start_flush() const;
  // Flushes to disk and closes, then replaces the path. Its directory is not flushed.
  void finish();

 private:
  [[noreturn]] void fail(Step step, const std::string& reason = system_reason()) const;
  const std::string path_;
  const Describe describe_;
  std::string target_, temporary_;  // where the links lead; empty if there is nothing to rename
  Descriptor file_;
};

// A folder that appears as a whole, or not at all: its files are written to a temporary folder
// beside it. One that a killed process left behind is removed by the next create() for its path.
class NewFolder : NonCopyable {
 public:
  // Throws InputError unless `path` does not exist or is an empty folder.
  explicit NewFolder(const std::string& path);
  ~NewFolder();  // removes the temporary folder
  // Makes the temporary folder and returns its path. Throws Error, as finish() does.
  std::string create();
  // Flushes the folder and gives it its name; folders above it that do not exist appear with it.
  void finish();

 private:
  std::string target_, temporary_;  // the outermost folder that is made, and its temporary name
  std::string inner_;               // "/b/c": the folder's path in `target_`; empty: itself
  Descriptor lock_;
};

// A file to which pieces are appended atomically: lines of a log, records of an event file.
class AppendFile {
 public:
  // Opens or creates a file. Paths are followed and refused as by DurableFile. Returns "", or the
  // reason of the failure.
  std::string open(const std::string& path);
  bool is_open() const { return file_.is_open(); }
  // Returns "" if the whole piece was appended, else the reason of the failure. A partly written
  // piece is truncated again, at the latest before the next one.
  std::string append(std::string_view piece);

 private:
  Descriptor file_;
  std::optional<int64_t> torn_at_;  // offset of a partial piece that could not be truncated
};

// A lock of a file that one process at a time can hold, released on destruction.
class FileLock {
 public:
  // Creates the file if it does not exist. If that fails, or it is a link, is_open() is false, and
  // errno is set.
  explicit FileLock(const std::string& path);
  bool is_open() const { return file_.is_open(); }
  // Returns false if another process holds the lock.
  bool try_lock() const;
  // Waits for the lock. Returns false and sets errno if the file system refuses it.
  bool lock() const;
  // False once the file has been removed: others lock a new one.
  bool exists() const;

 private:
  Descriptor file_;
};

// Writes a DurableFile.
void write_file_durable(const std::string& path, std::string_view text);
// write_file_durable() that flushes the directory too: the new text is what a crash leaves.
void replace_file(const std::string& path, std::string_view text);
// Makes a directory and its parents if they do not exist. Throws Error naming the path and
// the reason.
void make_directory(const std::string& path);
// Throws Error naming both paths and the reason.
void rename_entry(const std::string& from, const std::string& to);
// Throws InputError if there is no such regular file or it has more than `max_bytes`, Error if it
// cannot be read.
std::string read_text_file(const std::string& path, int64_t max_bytes = INT64_MAX);

// The following functions report that something does not exist only if the system says so; they
// throw Error for any other failure.
//
// The names in a directory, sorted; none if it does not exist.
std::vector<std::string> list_directory(const std::string& path);
bool path_exists(const std::string& path);
// A directory itself, not a link to one.
bool is_own_directory(const std::string& path);
// Bytes of a file that can be opened; -1 if it does not exist. Throws InputError if it is not a
// regular file.
int64_t readable_size(const std::string& path);

// Bytes that this user may still write to the file system of `path`, or of its nearest parent that
// exists; INT64_MAX if the system does not say.
int64_t free_disk_bytes(const std::string& path);

// Flushes a directory entry after a rename. Throws Error if that fails.
void sync_directory(const std::string& path);
// XXH3-64 of a file as 16 hex digits. Throws InputError if there is no such file, Error if it
// cannot be read.
std::string file_checksum(const std::string& path);
// 16 hex digits.
std::string hex(uint64_t checksum);
// XXH3-64 of bytes, seeded with the checksum of the bytes before them.
uint64_t checksum(std::string_view bytes, uint64_t before = 0);

}  // namespace cohort
