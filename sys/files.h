// File system steps that must not lose data: durable writes, atomic replacement, checksums, run
// directories and their lock.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cohort {

// Writes and flushes to disk. Throws Error naming the path and the system's reason.
void write_file_durable(const std::string& path, const std::string& text);
// write_file_durable() through a temporary name and a rename, so that readers see either the old or
// the new text.
void replace_file(const std::string& path, const std::string& text);
// Makes a directory and its parents if they do not exist. Throws Error naming the path and
// the reason.
void make_directory(const std::string& path);
// Throws Error naming both paths and the reason.
void rename_entry(const std::string& from, const std::string& to);
// Throws InputError if there is no such file, Error if it cannot be read.
std::string read_text_file(const std::string& path);

// The following functions report that something does not exist only if the system says so; they
// throw Error for any other failure.
//
// The names in a directory, sorted; none if it does not exist.
std::vector<std::string> list_directory(const std::string& path);
bool path_exists(const std::string& path);
// A directory itself, not a link to one.
bool is_own_directory(const std::string& path);
// Bytes of a file that can be opened; -1 if it does not exist.
int64_t readable_size(const std::string& path);

// Flushes a directory entry after a rename. Throws Error if that fails.
void sync_directory(const std::string& path);
// XXH3-64 of a file as 16 hex digits. Throws InputError if there is no such file, Error if it
// cannot be read.
std::string file_checksum(const std::string& path);
// 16 hex digits.
std::string hex(uint64_t checksum);
// XXH3-64 of bytes, seeded with the checksum of the bytes before them.
uint64_t checksum(std::string_view bytes, uint64_t before = 0);

// Creates `wanted`, or `wanted`-2, -3, ... if it exists: two runs never share a directory. Returns
// its path.
std::string create_run_directory(const std::string& wanted);

// Holds a run directory for this process; throws InputError if another process has it.
class RunLock {
 public:
  explicit RunLock(const std::string& run_dir);
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  int fd_;
};

}  // namespace cohort
