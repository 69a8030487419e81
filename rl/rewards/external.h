// command, http, judge: rewards that an external program or a server computes, or a callback in its
// place, whose answers are numbers or null.
//
// A program reads requests from its standard input and answers each on its standard output with a
// line of JSON, which it must flush. Its standard error is appended to workers.log in the run's
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
//
// A server (http) gets each request as the body of a POST, and answers with the same object; a
// judge's are in rl/rewards/judge.h. Requests of a server are asked once: see AnswerLog.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/non_copyable.h"
#include "rl/answer_log.h"
#include "rl/caller.h"
#include "rl/rewards/judge.h"

namespace cohort {

class ExternalReward : NonCopyable {
 public:
  // Throws InputError as Caller, Judge and ServerConfig::validate() do. `config` is_external().
  explicit ExternalReward(const RewardConfig& config);
  // True if `config` asks for these programs, this server or this callback: it is equal but for the
  // weight.
  bool runs(const RewardConfig& config) const;
  bool is_code() const { return config_.name == "code"; }

  // As Caller::submit(). A completion whose index was already submitted since the last collect() is
  // ignored.
  void submit(const RewardInput& input);

  struct Result {
    double value = 0;     // NaN: not applicable, or failed
    std::string error;    // empty: no failure
    std::string outcome;  // `code`: one of passed, failed, timeout and no_code
  };
  // Waits for all completions submitted since the last call. Keys are RewardInput::index. Throws
  // InputError naming the reward for values of a callback that are no finite numbers, or too few or
  // many.
  std::map<int64_t, Result> collect();

 private:
  // A list is addressed by its number, a vote by RewardInput::index and its own number.
  using Key = Caller::Key;
  void send_lists();
  // Submits a request unless a server was asked for the same before.
  void ask(const Json& request, Key key);
  std::string hash_of(const std::string& request) const;
  // Returns what is wrong with an answer; empty: it is valid, and a server's score is in the log.
  std::string take_answer(const std::string& request, const std::string& answer);
  // The answer to a request that has the score, or list of scores, in the log.
  Json answer_of(Key key, const Json& score) const;
  // Adds the results of an answer to a request, or those of its failure.
  void add(Key key, const Json& answer, const std::string& error,
           std::map<int64_t, Result>& out) const;
  // The result for the completion `index`, whose answer is valid.
  Result result_of(const Json& answer, int64_t index) const;

  const RewardConfig config_;
  const std::optional<Judge> judge_;
  // With a server: the log from the first request on, and the keys of equal requests by their hash.
  std::shared_ptr<AnswerLog> log_;
  std::map<std::string, std::vector<Key>> asked_;
  Caller caller_;
  Json::Array unsent_;                             // `batch`
  std::map<int64_t, std::vector<int64_t>> lists_;  // indices of the completions of each list
  std::map<int64_t, std::string> submitted_;       // excerpts of completions by their index
  std::string sandbox_;                            // `code`: its kind, once an answer has named it
};

}  // namespace cohort
