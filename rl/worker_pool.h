// Programs that answer requests, a line each, while the caller goes on.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "rl/worker_host.h"

namespace cohort {

struct WorkerPoolOptions {
  WorkerHost::Program program;
  int workers = 1;
  double timeout = 10;        // seconds for an answer
  double start_timeout = 60;  // for the first answer of a program
  // What is wrong with an answer; empty: nothing. Called from another thread.
  std::function<std::string(const std::string& request, const std::string& answer)> fault_of;
};

class WorkerPool {
 public:
  // Starts the programs. Throws InputError if they cannot be.
  WorkerPool(WorkerHost& host, WorkerPoolOptions options);
  ~WorkerPool();

  // One line, without its end.
  void submit(std::string request);

  struct Answer {
    std::string line;
    std::string fault;  // why there is none; empty: there is one
  };
  // Waits for all that have been submitted since the last call, in that order. A program that takes
  // too long, ends, writes 1 MB more than it was sent, or gives an answer that fault_of() refuses
  // is started anew, and costs the request it had: a request is never sent twice. Where three first
  // answers have not come in time, and no other answer ever, none is waited for any more.
  // Throws Error if the host has gone.
  std::vector<Answer> collect();

 private:
  class Loop;
  std::unique_ptr<Loop> loop_;
};

}  // namespace cohort
