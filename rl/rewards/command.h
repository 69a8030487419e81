// command: a reward that an external program computes, or in its place a function of the host
// program (HostReward).
//
// The program reads requests from its standard input and answers each on its standard output with a
// line of JSON, which it must flush. Its standard error is appended to rewards.log in the run's
// directory.
//   request  {"index": 3, "step": 0, "prompt": "...", "completion": "...", "answer": "...",
//             "fields": {...}, "messages": [...],     (messages: conversations only)
//             "transcript": [...],                    (dialogues only: all after the prompt)
//             "length": 17, "max_length": 64, "truncated": false, "stop_reason": "stop_token"}
//   answer   {"index": 3, "reward": 0.5}              null: the reward does not apply
//        or  {"index": 3, "error": "why there is no reward"}
// `length` counts the sampled tokens, the stop token included, and `max_length` is the run's
// max_completion_length. `stop_reason` is one of stop_token, stop_string, length, context and
// cancelled; the last three are truncated. These four are left out where the tokens are unknown.
// Evaluations send the same requests; `step` is the number of finished steps, and `index` counts
// the completions of the evaluation. With `batch: true` a request is a list of such objects, and
// the answer is the list of their answers in the same order. A failure of the program fails its
// whole list, an `error` only one completion.
#pragma once

#include <algorithm>
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
  // Throws InputError for a command line that cannot be split. `config` is_external().
  explicit CommandReward(const RewardConfig& config);
  // True if `config` asks for these programs or this function: it is equal but for the weight.
  bool runs(const RewardConfig& config) const;

  // The first call starts the programs, and throws InputError if that fails. A function is called
  // by collect(). A completion whose
  // index was already submitted since the last collect() is ignored.
  void submit(const RewardInput& input);

  struct Result {
    double value = 0;   // NaN: not applicable, or failed
    std::string error;  // empty: no failure
  };
  // Waits for all completions submitted since the last call. Keys are RewardInput::index. Throws
  // InputError naming the reward for values of a function that are not finite, or too few or many.
  std::map<int64_t, Result> collect();

 private:
  void flush();
  std::map<int64_t, Result> call_function();

  const RewardConfig config_;
  WorkerPoolOptions options_;
  std::unique_ptr<WorkerPool> pool_;
  Json::Array unsent_;                           // sent by collect(): `batch`, functions
  std::vector<std::vector<int64_t>> requested_;  // completions of each request
  std::set<int64_t> submitted_;
};

// Splits a command line into words, separated by blanks outside of '...' and "...". Throws
// InputError for an unclosed quote or an empty command line. No shell is involved: $, *, | and >
// are ordinary characters.
std::vector<std::string> split_command(const std::string& text);

// The options that a reward and an environment of programs have in common. Throws as
// split_command() does.
template <class Config>
WorkerPoolOptions worker_options(const Config& config) {
  return {.program = {.command = split_command(config.run),
                      .directory = config.directory,
                      .memory = config.memory << 20},
          .workers = static_cast<int>(config.workers),
          .timeout = config.timeout,
          .start_timeout = std::max(config.timeout, config.start_timeout)};
}

}  // namespace cohort
