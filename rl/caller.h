// Calls to code outside this library, with requests and answers in JSON: external programs or, in
// their place, a callback of the training program.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "config/visitor.h"
#include "rl/worker_pool.h"
#include "text/json.h"

namespace cohort {

// Is called with the requests since the last call, in the order of their `index`, and returns an
// answer to each. Ranks that are threads call it concurrently. Its exceptions end the run.
using Callback = std::function<std::vector<Json>(std::span<const Json> requests)>;

// The keys of a reward or an environment of programs.
struct ProgramConfig {
  std::string run, directory;               // the command line and its working directory
  std::optional<int64_t> workers = {};      // processes; nullopt: one, of `code` one per core
  int64_t memory = 0;                       // MiB of address space of each; 0: no limit
  double timeout = 10, start_timeout = 60;  // seconds
  std::shared_ptr<const Callback> callback = nullptr;  // no key: bind_callbacks() sets it
  bool operator==(const ProgramConfig&) const = default;
  void visit(ConfigVisitor& v);
};

// Sends requests to programs, or to the callback. See WorkerPool.
class Caller {
 public:
  using Key = WorkerPool::Key;
  // `name`: for errors. `options`: without what `config` has. Throws InputError
  // for a command line that cannot be split.
  Caller(std::string name, const ProgramConfig& config, WorkerPoolOptions options);

  // Starts the programs, if they are not running. Throws InputError if that fails.
  void start();
  void submit(const Json& request, Key key);  // calls start()

  struct Answer {
    Json value;
    std::string error;  // empty: `value` is a valid answer
    Key key;
  };
  // Calls the callback, and throws InputError naming it unless it answers each request.
  std::vector<Answer> take(WorkerPool::Wait wait);
  void cancel();  // gives up all requests

 private:
  const std::string name_;
  const std::shared_ptr<const Callback> callback_;
  WorkerPoolOptions options_;
  std::unique_ptr<WorkerPool> pool_;
  std::map<Key, Json> unsent_;  // for the callback
};

// Splits a command line into words, separated by blanks outside of '...' and "...". Throws
// InputError for an unclosed quote or an empty command line. No shell is involved: $, *, | and >
// are ordinary characters.
std::vector<std::string> split_command(const std::string& text);

}  // namespace cohort
