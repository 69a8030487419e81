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
  // Starts the programs. Throws InputError if that fails.
  WorkerPool(ProcessSpawner& spawner, WorkerPoolOptions options);
  ~WorkerPool();

  // `request` is one line, without its line break. It waits while its program has an unanswered
  // request of the same key, be it one that was cancelled.
  void submit(std::string request, Key key = {});

  struct Answer {
    std::string line;
    std::string error;  // empty: `line` is a valid answer
    Key key = {};
  };
  // Waits for the answers to all requests since the last call, in the order of submission. A
  // program is restarted if it has requests and answers none of them for the time of an answer,
  // ends, writes 1 MB more than its request, answers no request, or gives an answer that validate()
  // or key_of() rejects. All its requests then fail: a request is never sent twice. If three first
  // answers have timed out and no program has ever answered, all further requests fail at once.
  // Throws Error if the spawner has ended.
  std::vector<Answer> collect();
  // Returns the answers that have come. With `wait`, waits for one unless no request is unanswered.
  std::vector<Answer> poll(bool wait);
  // Gives up all requests; answers to them are ignored.
  void cancel();

 private:
  class Loop;
  std::unique_ptr<Loop> loop_;
};

}  // namespace cohort
