// Reading of user-named files and folders, with errors that name the path.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sys/descriptor.h"

namespace cohort {

// Pairs of a name and the content.
using NamedFiles = std::vector<std::pair<std::string, std::string>>;

// Bytes that read_input_file() reads at most, and the longest part that InputFile::read() returns.
inline constexpr int64_t kMaxText = int64_t{1} << 30;

// Names of descriptors that this process has inherited (/dev/stdin, /dev/fd/N), as in `<(command)`,
// may be streams for readers that read once.
enum class Streams { kRefused, kInherited };

// "a folder", "a FIFO", ...: the type in st_mode.
const char* type_name(unsigned mode);
// Opens a regular file for reading, never waiting for a FIFO; links are followed. Not open, with
// errno set, if the system refuses. Throws InputError("PATH: ...") if it is anything else.
Descriptor open_regular(const std::string& path, Streams streams = Streams::kRefused);
// open_regular(); throws InputError("PATH: ...") if the system refuses too.
Descriptor open_input_file(const std::string& path, Streams streams = Streams::kRefused);

// A file that several threads read concurrently.
class InputFile {
 public:
  // Throws InputError as open_input_file() does.
  explicit InputFile(std::string path);
  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }  // when it was opened
  // Bytes [begin, end), at most kMaxText. Throws InputError if reading fails or the file is
  // shorter.
  std::string read(int64_t begin, int64_t end) const;
  // The `size` bytes from `begin` on. Throws as read() does.
  void read_to(void* out, int64_t begin, int64_t size) const;
  // Hint to the system to read bytes [begin, end) ahead.
  void will_read(int64_t begin, int64_t end) const;

 private:
  std::string path_;
  Descriptor file_;
  int64_t size_;
};

// Calls use(chunk) for all bytes of a file or an inherited stream in order. Returns 0, or the errno
// of a failure. Throws InputError as open_regular() does, and if there are more than `max_bytes`.
int read_chunks(const std::string& path, const std::function<void(std::string_view)>& use,
                int64_t max_bytes = INT64_MAX);
// All bytes of a file or an inherited stream. Throws InputError as open_input_file() does, if
// reading fails, and for more than kMaxText bytes.
std::string read_input_file(const std::string& path);
// Reads the files of `names` that exist in a folder. Throws Error if the system cannot tell whether
// one exists, InputError as read_input_file() does.
NamedFiles read_files(const std::string& folder, std::span<const char* const> names);
// Content of the file called `name`; nullptr if there is none.
const std::string* find_file(const NamedFiles& files, std::string_view name);

}  // namespace cohort
