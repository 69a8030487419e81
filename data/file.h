// Reading what the user named: whole files and folders told apart, with errors that name the path.
#pragma once

#include <fstream>
#include <string>

namespace cohort {

// Open for reading. Throws InputError("PATH: ...") if it does not exist, is a folder or cannot be
// opened.
std::ifstream open_input_file(const std::string& path);
// Throws InputError if reading `file` has failed, not just ended.
void check_read(const std::ifstream& file, const std::string& path);

// All bytes of `path`.
std::string read_input_file(const std::string& path);

}  // namespace cohort
