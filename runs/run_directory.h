// The directory of a run: a new one for each run, and the lock of the process that uses it.
#pragma once

#include <string>

#include "sys/files.h"

namespace cohort {

// Creates `wanted`, or `wanted`-2, -3, ... if it exists: two runs never share a directory. Returns
// its path. Throws InputError if it cannot be created.
std::string create_run_directory(const std::string& wanted);

// Holds a run directory for this process; throws InputError if another process has it.
class RunLock {
 public:
  explicit RunLock(const std::string& run_dir);

 private:
  FileLock lock_;
};

}  // namespace cohort
