// Reading of user-named files and folders, with errors that name the path.
#pragma once

#include <cstdint>
#include <fstream>
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

// Open for reading. Throws InputError("PATH: ...") if it does not exist, is a folder or cannot be
// opened.
std::ifstream open_input_file(const std::string& path);
// Throws InputError if the last read failed other than by the end of the file.
void check_read(const std::ifstream& file, const std::string& path);

// A file that several threads read concurrently.
class InputFile {
 public:
  // Throws InputError as open_input_file() does.
  explicit InputFile(std::string path);
  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }  // when it was opened
  // Bytes [begin, end). Throws InputError if reading fails or the file is shorter.
  std::string read(int64_t begin, int64_t end) const;
  // Hint to the system to read bytes [begin, end) ahead.
  void will_read(int64_t begin, int64_t end) const;

 private:
  std::string path_;
  Descriptor file_;
  int64_t size_;
};

// Calls use(chunk) for all bytes of a file in order. Returns 0, or the errno of a failure.
int read_chunks(const std::string& path, const std::function<void(std::string_view)>& use);
// All bytes of `path`. Throws InputError as open_input_file() and check_read() do.
std::string read_input_file(const std::string& path);
// Reads the files of `names` that exist in a folder.
NamedFiles read_files(const std::string& folder, std::span<const char* const> names);
// Content of the file called `name`; nullptr if there is none.
const std::string* find_file(const NamedFiles& files, std::string_view name);

}  // namespace cohort
