// A small process that starts programs for this one and ends them, with all that they have started,
// when this one ends in any way. It is forked before there is a model, a thread or CUDA: what a
// large process forks later would hold its memory.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "core/descriptor.h"

namespace cohort {

class WorkerHost {
 public:
  WorkerHost();
  // Ends every program, and waits for that.
  ~WorkerHost();
  WorkerHost(const WorkerHost&) = delete;
  WorkerHost& operator=(const WorkerHost&) = delete;

  struct Program {
    std::vector<std::string> command;  // found along PATH, as a shell would
    std::string directory;             // where it runs; empty: here
    int64_t memory = 0;                // bytes of address space at most; 0: no limit
  };
  struct Started {
    pid_t id = -1;  // its process, and the process group of it and its children
    Descriptor input,
        output;  // ours: to its standard input, from its standard output; not blocking
  };
  // Throws InputError if it cannot be started.
  Started start(const Program& program);
  // The file to which the standard error of programs that are started from now on is appended;
  // empty, as at first: that of this process. When it is longer than 256 MB it is cut to nothing.
  void set_log(const std::string& path);
  // Kills the program and its process group. Returns how it had ended: "exit code 1", "signal 9".
  std::string end(pid_t id);

 private:
  std::mutex mutex_;
  std::string log_;
  Descriptor socket_;
  pid_t host_ = -1;
};

// The one of this process, which is made at the first call.
WorkerHost& worker_host();

}  // namespace cohort
