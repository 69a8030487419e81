// The directory of a run: a new one for each run, and the lock of the process that uses it.
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "sys/files.h"

namespace cohort {

// Creates `wanted`, or `wanted`-2, -3, ... if it exists: two runs never share a directory. Returns
// its path. Throws InputError if it cannot be created.
std::string create_run_directory(const std::string& wanted);

// Creates `wanted` unless it exists, and returns it. Throws as create_run_directory() does.
std::string make_run_directory(const std::string& wanted);

// The path that create_run_directory() would choose now; creates nothing. Throws as it does if the
// path is taken by something that is no directory.
std::string next_run_directory(const std::string& wanted);

// Path of config.yaml of the run that wrote `checkpoint`, by the run's layout, links resolved:
// RUN/config.yaml of RUN/checkpoints/step-N or RUN/2-grpo/checkpoints/step-N. nullopt for a folder
// at any other place.
std::optional<std::string> find_run_config(const std::string& checkpoint);

// Holds a run directory for this process; throws InputError if another process has it.
FileLock lock_run_directory(const std::string& run_dir);

// Waits until no process has the lock of the directory, if it exists, for at most `limit`: a killed
// process with a GPU takes seconds to end.
void wait_for_run_directory(const std::string& run_dir, std::chrono::milliseconds limit);

}  // namespace cohort
