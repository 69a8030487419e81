// A pool of programs that answer requests, one line each, asynchronously.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "rl/process_spawner.h"

namespace cohort {

struct WorkerPoolOptions {
  // Identifies a request by its dialogue and turn.
  struct Key {
    int64_t index = 0, turn = 0;
    auto operator<=>(const Key&) const = default;
  };
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
  std::function<Key(const std::string& answer)> key_of;
};

class WorkerPool {
 public:
  using Key = WorkerPoolOptions::Key;
  virtual ~WorkerPool() = default;

  // `request` is one line, without its line break. It waits while its program has an unanswered
  // request of the same key, be it one that was cancelled.
  virtual void submit(std::string request, Key key = {}) = 0;

  struct Answer {
    std::string line;
    std::string error;  // empty: `line` is a valid answer
    Key key = {};
  };
  enum class Wait { kNone, kOne, kAll };
  // Returns the answers since the last call, in the order of submission. kOne waits for an answer,
  // kAll for all; neither waits if no request is unanswered. A program is restarted if it has
  // requests and answers none of them for the time of an answer, ends, writes 1 MB more than its
  // request, answers no request, or gives an answer that validate() or key_of() rejects. All its
  // requests then fail: a request is never sent twice. If three first answers have timed out and no
  // program has ever answered, all further requests fail at once. Throws Error if the spawner has
  // ended.
  virtual std::vector<Answer> take(Wait wait) = 0;
  // Gives up all requests; answers to them are ignored.
  virtual void cancel() = 0;
};

// Starts the programs. Throws InputError if that fails.
std::unique_ptr<WorkerPool> make_worker_pool(ProcessSpawner& spawner, WorkerPoolOptions options);

}  // namespace cohort
