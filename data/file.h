// Reading what the user named: whole files and folders told apart, with errors that name the path.
#pragma once

#include <cstdint>
#include <fstream>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/descriptor.h"

namespace cohort {

// Name and content.
using NamedFiles = std::vector<std::pair<std::string, std::string>>;

// Open for reading. Throws InputError("PATH: ...") if it does not exist, is a folder or cannot be
// opened.
std::ifstream open_input_file(const std::string& path);
// Throws InputError if reading `file` has failed, not just ended.
void check_read(const std::ifstream& file, const std::string& path);

// A file of which threads read parts.
class InputFile {
 public:
  // Throws InputError as open_input_file() does.
  explicit InputFile(std::string path);
  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }  // as it was opened
  // Bytes [begin, end). Throws InputError if that fails, or if the file does not have them.
  std::string read(int64_t begin, int64_t end) const;
  // Tells the system that they will be read soon.
  void will_read(int64_t begin, int64_t end) const;

 private:
  std::string path_;
  Descriptor file_;
  int64_t size_;
};

// use(chunk) for all bytes of a file in order. Returns 0, or the error number of what has failed.
int read_chunks(const std::string& path, const std::function<void(std::string_view)>& use);
// All bytes of `path`. Throws InputError as the two above do.
std::string read_input_file(const std::string& path);
// Those of these files that a folder has.
NamedFiles read_files(const std::string& folder, std::span<const char* const> names);
// The content of one of them; nullptr: it is not there.
const std::string* find_file(const NamedFiles& files, std::string_view name);

}  // namespace cohort
