// Requests to a server of the user's choice, which answers each POST of a line of JSON.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "config/visitor.h"
#include "rl/request_pool.h"

namespace cohort {

// The keys of a reward or an environment behind a server.
struct ServerConfig {
  std::string url;
  // Header -> its value, with ${NAME} for each variable of the environment, which is read when the
  // pool is made and is written nowhere.
  std::map<std::string, std::string> headers_env;
  std::string ca_file, proxy;
  int64_t retries = 5;
  double outage_minutes = 30;
  // A request to stop the run ends an outage. No key: the run sets it.
  const std::atomic<bool>* stop = nullptr;
  bool operator==(const ServerConfig&) const = default;
  void visit(ConfigVisitor& v);
  // Itself. Throws InputError naming the key, for a URL that is not absolute or has a password,
  // headers without a variable, and a key that would be sent in the clear to another machine.
  const ServerConfig& validate() const;
  // Names of the environment's variables that the headers have. Throws InputError.
  std::vector<std::string> variables() const;
};

struct HttpPoolOptions {
  std::string name;  // for messages: "reward judge"
  ServerConfig server;
  int64_t concurrent = 32;
  double timeout = 60;  // seconds for a whole request
  // As that of WorkerPoolOptions.
  std::function<std::string(const std::string& request, const std::string& answer)> validate = {};
  std::chrono::duration<double> second{1};  // between tries; tests make it shorter
};

// Lost, half and late answers, and those with the status 408, 429 or 5xx, are asked for again after
// 1, 2, 4, ... 60 s, or after the server's Retry-After, of which 60 s count at most. A request
// fails if its last retry fails, at once for any other status than 2xx, and if validate() refuses
// its answer. While nothing is answered, requests wait for longer than their retries, unless one is
// alone or at most 5 % are left of the most that were unanswered at a time. After outage_minutes
// without an answer, or two before the first, take() throws InputError, and so it does if `stop` is
// set while requests are tried again. Values of the environment never reach an error or an answer.
// Throws InputError as validate() does, for variables that are not set, and as HttpClient does.
std::unique_ptr<RequestPool> make_http_pool(HttpPoolOptions options);

}  // namespace cohort
