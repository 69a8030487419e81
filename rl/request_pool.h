// Pools that answer requests asynchronously: programs (rl/worker_pool.h) or a server
// (rl/http_pool.h).
#pragma once

#include <compare>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace cohort {

// The fraction of a step's requests that may fail: more of them end the run, or are an outage.
inline constexpr double kMaxFailedFraction = 0.05;

// A thread serves the requests.
class RequestPool {
 public:
  // Identifies a request by its dialogue and turn.
  struct Key {
    int64_t index = 0, turn = 0;
    auto operator<=>(const Key&) const = default;
  };
  struct Answer {
    std::string line;
    std::string error;  // empty: `line` is a valid answer
    Key key = {};
  };
  enum class Wait { kNone, kOne, kAll };
  virtual ~RequestPool() = default;

  // `request` is one line, without its line break.
  void submit(std::string request, Key key);
  void submit(std::string request) { submit(std::move(request), Key()); }
  // Returns the answers since the last call, in the order of submission. kOne waits for an answer,
  // kAll for all; neither waits if no request is unanswered. Throws what has ended the pool.
  std::vector<Answer> take(Wait wait);
  // Gives up all requests; answers to them are ignored.
  void cancel();

 protected:
  struct Request {
    int64_t number = 0;  // in the order of submission
    Key key;
    std::string line;
  };
  // Starts the thread, which calls serve() until end(). Signals are for other threads: without
  // SIGPIPE, write() to an ended program fails with EPIPE.
  void start();
  void end();  // for destructors of derived classes
  // Begins to serve new requests, waits for the next event and handles it. Those before `first` are
  // cancelled. What it throws has ended the pool.
  virtual void serve(std::vector<Request> submitted, int64_t first) = 0;
  virtual void wake() = 0;  // ends the present serve(), or the next one
  // The answer of a request that has none; no effect if it was cancelled.
  void finish(const Request& request, Answer answer);

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable answered_;
  std::vector<Request> submitted_;
  std::map<int64_t, Answer> answers_;  // by the request's number
  int64_t num_begun_ = 0, num_unanswered_ = 0, num_cancelled_ = 0;
  std::exception_ptr failure_;
  bool ended_ = false;
  std::thread thread_;
};

}  // namespace cohort
