// command: a reward that another program computes, in any language.
//
// The program reads requests from its standard input and answers each on its standard output with a
// line of JSON, at once (flush!). What it writes to standard error goes to rewards.log in the run's
// directory.
//   request  {"index": 3, "step": 0, "prompt": "...", "completion": "...", "answer": "...",
//             "fields": {...}, "messages": [...]}     (messages: of conversations only)
//   answer   {"index": 3, "reward": 0.5}              null: the reward does not apply
//        or  {"index": 3, "error": "why there is none"}
// An evaluation asks in the same way; `step` is the number of steps made, `index` that of its own
// completions.
// With `batch: true` a request is a list of such objects, all of a step that are there, and the
// answer the list of theirs in the same order. A program that fails costs its whole list; an
// `error` one completion.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "rl/reward.h"
#include "rl/worker_pool.h"

namespace cohort {

class CommandReward {
 public:
  // Throws InputError for a command line that cannot be split.
  explicit CommandReward(const RewardConfig& config);

  // Starts the programs before the first. Throws InputError if they cannot be. Nothing happens
  // where a completion of this index waits for collect() already.
  void submit(const RewardInput& input);

  struct Result {
    double value = 0;   // NaN: not applicable, or there is none
    std::string fault;  // why there is none; empty: there is one
  };
  // Of all that has been submitted since the last call, by RewardInput::index.
  std::map<int64_t, Result> collect();

 private:
  void flush();

  const bool batch_;
  const WorkerPoolOptions options_;
  std::unique_ptr<WorkerPool> pool_;
  Json::Array waiting_;                      // with `batch`: what collect() will send
  std::vector<std::vector<int64_t>> asked_;  // completions of each request
  std::set<int64_t> known_;
};

// The same for equal configurations, as long as this thread has one: programs may be large.
std::shared_ptr<CommandReward> shared_command(const RewardConfig& config);

// The words of a command line: separated by spaces, with '...' and "..." around words that hold
// some. Throws InputError for a quote that is not closed, or no word. No shell is involved: $, *,
// | and > mean nothing.
std::vector<std::string> split_command(const std::string& text);

}  // namespace cohort
