// Calls to code outside this library, with requests and answers in JSON: external programs, a
// server or, in their place, a callback of the training program.
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
#include "rl/http_pool.h"
#include "rl/worker_pool.h"
#include "text/json.h"

namespace cohort {

// Is called with the requests since the last call, in the order of their `index`, and returns an
// answer to each. Ranks that are threads call it concurrently. Its exceptions end the run.
using Callback = std::function<std::vector<Json>(std::span<const Json> requests)>;

// The keys of a reward or an environment of programs.
struct ProgramConfig {
  std::string run, directory;           // the command line and its working directory
  std::optional<int64_t> workers = {};  // processes; nullopt: one, of `code` one per core
  int64_t memory = 0;                   // MiB of address space of each; 0: no limit
  // Seconds for an answer; nullopt: 10 of a program, 60 of a server. And for a program's first.
  std::optional<double> timeout = {};
  double start_timeout = 60;
  std::shared_ptr<const Callback> callback = nullptr;  // no key: bind_callbacks() sets it
  bool operator==(const ProgramConfig&) const = default;
  void visit(ConfigVisitor& v);
};

// Sends requests to programs, to a server if it has a URL, or to the callback. See RequestPool.
class Caller {
 public:
  using Key = RequestPool::Key;
  // `name`: for errors. `options`: without what the configurations have; a server answers each
  // request by itself, so that it needs no key_of(). Throws InputError for a command line that
  // cannot be split, and as ServerConfig::variables() does.
  Caller(std::string name, const ProgramConfig& config, const ServerConfig& server,
         WorkerPoolOptions options);

  // Starts the programs or the pool of the server, if they are not running. Throws InputError if
  // that fails.
  void start();
  void submit(const Json& request, Key key);  // calls start()

  struct Answer {
    Json value;
    std::string error;  // empty: `value` is a valid answer
    Key key;
  };
  // Calls the callback, and throws InputError naming it unless it answers each request.
  std::vector<Answer> take(RequestPool::Wait wait);
  void cancel();  // gives up all requests

 private:
  const std::string name_;
  const std::shared_ptr<const Callback> callback_;
  const ServerConfig server_;
  WorkerPoolOptions options_;
  std::unique_ptr<RequestPool> pool_;
  std::map<Key, Json> unsent_;  // for the callback
};

// Splits a command line into words, separated by blanks outside of '...' and "...". Throws
// InputError for an unclosed quote or an empty command line. No shell is involved: $, *, | and >
// are ordinary characters.
std::vector<std::string> split_command(const std::string& text);

}  // namespace cohort
