// Reading what the user named: whole files and folders told apart, with errors that name the path.
#pragma once

#include <string>

namespace cohort {

// The bytes of `path`. Throws InputError("PATH: ...") if it does not exist, is a folder or cannot
// be read.
std::string read_input_file(const std::string& path);

}  // namespace cohort
