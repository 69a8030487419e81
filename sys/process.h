// Starting of programs as child processes, pipes to them, and their exit.
#pragma once

#include <sys/types.h>

#include <array>
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "sys/descriptor.h"

namespace cohort {

struct Pipe {
  Descriptor reading, writing;
};
// If the system refuses, the ends are not open and errno is set.
Pipe make_pipe();

void set_non_blocking(const Descriptor& descriptor);

struct SpawnOptions {
  std::vector<std::string> command;      // the program, which is looked up in PATH, and arguments
  std::vector<std::string> environment;  // "NAME=VALUE"; empty: that of this process
  std::string directory;                 // working directory; empty: that of this process
  int64_t memory = 0;                    // limit of the address space in bytes; 0: no limit
  std::array<int, 3> streams{0, 1, 2};   // its standard input, output and error
};
struct Spawned {
  pid_t id = -1;  // process and process group; -1: no process could be started
  // 0, or the errno of the failure. A process that could not execute the program ends with code
  // 127, and still has to be waited for.
  int error = 0;
};
// Starts a program in a process group of its own, so that it does not receive the interrupts of the
// terminal. It is killed when the calling thread ends.
Spawned spawn(const SpawnOptions& options);

// Waits for a child process to end, by default without a limit. Returns its status as waitpid()
// does (exit code 127 if that was lost), or nullopt if it is still running after `limit`.
std::optional<int> wait_for_exit(pid_t id,
                                 std::optional<std::chrono::milliseconds> limit = std::nullopt);

}  // namespace cohort
