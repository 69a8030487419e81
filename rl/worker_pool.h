// A pool of programs that answer requests, one line each, asynchronously.
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
  double start_timeout = 60;  // seconds for the first answer of a program
  // Returns what is wrong with an answer; empty: it is valid. Called from another thread.
  std::function<std::string(const std::string& request, const std::string& answer)> validate;
};

class WorkerPool {
 public:
  // Starts the programs. Throws InputError if that fails.
  WorkerPool(WorkerHost& host, WorkerPoolOptions options);
  ~WorkerPool();

  // `request` is one line, without its line break.
  void submit(std::string request);

  struct Answer {
    std::string line;
    std::string error;  // empty: `line` is a valid answer
  };
  // Waits for the answers to all requests since the last call, in the order of submission. A
  // program is restarted if it times out, ends, writes 1 MB more than its request, or gives an
  // answer that validate() rejects. Its request then fails: a request is never sent twice. If three
  // first answers have timed out and no program has ever answered, all further requests fail at
  // once. Throws Error if the host has ended.
  std::vector<Answer> collect();

 private:
  class Loop;
  std::unique_ptr<Loop> loop_;
};

}  // namespace cohort
