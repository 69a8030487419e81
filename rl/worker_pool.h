// A pool of programs that answer requests, one line each, asynchronously.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "rl/process_spawner.h"
#include "rl/request_pool.h"

namespace cohort {

struct WorkerPoolOptions {
  ProcessSpawner::Program program;
  int workers = 1;
  size_t concurrent = 1;      // requests that a program has at a time
  double timeout = 10;        // seconds for an answer, from the request or the answer before
  double start_timeout = 60;  // seconds for the first answer of a program
  // Returns what is wrong with an answer; empty: it is valid. Called from another thread, as
  // key_of() is.
  std::function<std::string(const std::string& request, const std::string& answer)> validate;
  // Returns the key of the request that an answer is for, so that answers may come in any order,
  // and sends all requests of an index to one program. Throws InputError for an invalid answer.
  // Empty: each program answers its one request (concurrent = 1), whose key is ignored.
  std::function<RequestPool::Key(const std::string& answer)> key_of;
};

// A request waits while its program has an unanswered request of the same key, be it one that was
// cancelled. A program is restarted if it has requests and answers none of them for the time of an
// answer, ends, writes 1 MB more than its request, answers no request, or gives an answer that
// validate() or key_of() rejects. All its requests then fail: a request is never sent twice. If
// three first answers have timed out and no program has ever answered, all further requests fail at
// once. take() throws Error if the spawner has ended.
//
// Starts the programs. Throws InputError if that fails.
std::unique_ptr<RequestPool> make_worker_pool(ProcessSpawner& spawner, WorkerPoolOptions options);

}  // namespace cohort
