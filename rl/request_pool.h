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
#include <utility>
#include <vector>

namespace cohort {

// The fraction of a step's requests that may fail: more of them end the run, or are an outage.
inline constexpr double kMaxFailedFraction = 0.05;

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
  virtual void submit(std::string request, Key key) = 0;
  void submit(std::string request) { submit(std::move(request), Key()); }
  // Returns the answers since the last call, in the order of submission. kOne waits for an answer,
  // kAll for all; neither waits if no request is unanswered. Throws what has ended the pool.
  virtual std::vector<Answer> take(Wait wait) = 0;
  // Gives up all requests; answers to them are ignored.
  virtual void cancel() = 0;
};

// The answers of a pool on the way from its thread to its user. Thread-safe.
class AnswerBox {
 public:
  int64_t begin();  // the number of the next request, in the order of submission
  std::vector<RequestPool::Answer> take(RequestPool::Wait wait);
  void cancel();
  bool is_cancelled(int64_t number) const;
  // The answer of a request that has none; no effect if it was cancelled.
  void set(int64_t number, RequestPool::Answer answer);
  // The pool has ended: take() throws the present exception.
  void fail();

 private:
  mutable std::mutex mutex_;
  std::condition_variable answered_;
  std::map<int64_t, RequestPool::Answer> answers_;  // by the request's number
  int64_t num_begun_ = 0, num_unanswered_ = 0, num_cancelled_ = 0;
  std::exception_ptr failure_;
};

}  // namespace cohort
