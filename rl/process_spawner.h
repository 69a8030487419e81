// A small helper process that starts programs on behalf of this process, and kills them and all of
// their descendants when this process ends in any way. It is forked before there is a model, a
// thread or CUDA: a child forked later would keep the memory of a large process alive.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "core/non_copyable.h"
#include "sys/descriptor.h"

namespace cohort {

// All functions resume a spawner that has been stopped (SIGSTOP), with a warning, and throw
// Error if it has ended or does not answer.
class ProcessSpawner : NonCopyable {
 public:
  ProcessSpawner();
  // Kills every program and waits until all have ended.
  ~ProcessSpawner();

  struct Program {
    std::vector<std::string> command;  // looked up in PATH
    std::string directory;             // working directory; empty: that of this process
    int64_t memory = 0;                // limit of the address space in bytes; 0: no limit
  };
  struct Started {
    pid_t id = -1;  // process and process group
    // Non-blocking ends of the pipes to its standard input and from its standard output.
    Descriptor input, output;
  };
  // Throws InputError if it cannot be started.
  Started start(const Program& program);
  // Takes variables out of the environment of the programs that are started later, by any spawner.
  static void hide_variables(const std::vector<std::string>& names);
  // Sets the file to which programs that are started later append their standard error. Empty, the
  // default: the standard error of this process. The file is emptied when it exceeds 256 MB. With
  // `quotes`, end() quotes its last line.
  void set_log(const std::string& path, bool quotes = true);
  // Kills the program and its process group, after `patience` for it to end by itself. Returns how
  // it ended: "(exit code 1)", "(signal 9)" if that was sent by another process, or "(ended by
  // cohort)". Of a program that ended by itself, the last line of the log follows if the log has
  // grown since the program was started: "(exit code 1); the last line of workers.log: 'KeyError'".
  std::string end(pid_t id, std::chrono::milliseconds patience = {});

 private:
  std::mutex mutex_;
  std::string log_;
  bool quotes_log_ = true;
  std::map<pid_t, int64_t> log_sizes_;  // bytes in the log when each program was started
  Descriptor socket_;
  pid_t spawner_ = -1;
};

// Keeps in memory, during its life, the standard error of the programs that a spawner starts, as
// its log. Throws Error if the system has no room.
class ErrorCapture : NonCopyable {
 public:
  explicit ErrorCapture(ProcessSpawner& spawner);
  // Later programs have the standard error of this process.
  ~ErrorCapture() { spawner_.set_log(""); }
  // The last 10 lines, of 4096 bytes at most, each after a line break and indented; empty: none.
  std::string last_lines() const;

 private:
  ProcessSpawner& spawner_;
  Descriptor file_;
};

// The spawner of this process, created by the first call.
ProcessSpawner& process_spawner();

}  // namespace cohort
