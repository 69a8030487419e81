// Reading what the user named: whole files and folders told apart, with errors that name the path.
#pragma once

#include <fstream>
#include <functional>
#include <string>
#include <string_view>

namespace cohort {

// Open for reading. Throws InputError("PATH: ...") if it does not exist, is a folder or cannot be
// opened.
std::ifstream open_input_file(const std::string& path);
// Throws InputError if reading `file` has failed, not just ended.
void check_read(const std::ifstream& file, const std::string& path);

// use(chunk) for all bytes of a file in order. Returns 0, or the error number of what has failed.
int read_chunks(const std::string& path, const std::function<void(std::string_view)>& use);
// All bytes of `path`. Throws InputError as the two above do.
std::string read_input_file(const std::string& path);

}  // namespace cohort
