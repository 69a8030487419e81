// The table of rewards, and the search for an answer in a completion.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "rl/reward.h"
#include "text/regex.h"

namespace cohort {

// A new reward is the file rl/rewards/<name>.cpp, which defines make_<name>(), and a line R here
// with its keys. (Those by length share length.cpp.) Those of a line E are no functions of one
// completion: RewardSet submits to an ExternalReward and collects from it.
#define COHORT_SERVER_KEYS "url headers_env ca_file proxy concurrent timeout retries outage_minutes"
#define COHORT_REWARDS(R, E)                                                                     \
  E(code, "the program in the last fenced block passes the tests of the line, in a sandbox",     \
    "fence prefix credit inside run sandbox workers timeout memory")                             \
  E(command, "computed by an external program: run",                                             \
    "run directory workers timeout start_timeout memory batch")                                  \
  R(contains, "the found text contains the answer", "pattern")                                   \
  R(cosine, "right or wrong, scaled by half a cosine of the length: correct",                    \
    "correct threshold right wrong max_length")                                                  \
  R(countdown, "an expression that reaches fields.target from fields.numbers", "pattern")        \
  R(distinct, "the fraction of distinct runs of four words", "pattern")                          \
  R(environment, "the sum of the rewards that the environment gave to the turns; 0: none", "")   \
  R(exact_match, "the found text is the answer", "pattern")                                      \
  R(format, "the pattern matches the whole completion", "pattern")                               \
  E(http, "computed by a server: url", COHORT_SERVER_KEYS " batch")                              \
  E(judge, "a model's judgement, asked as an OpenAI-style server is: url, model, prompt",        \
    COHORT_SERVER_KEYS " model prompt system pattern field scale temperature max_tokens votes")  \
  R(length, "minus penalty times the length, as a fraction of max_length", "penalty max_length") \
  R(math, "the final answer is the answer, as text or as a number", "pattern")                   \
  R(numeric, "the found number equals the answer", "pattern")                                    \
  R(overlong, "0, and from buffer tokens before max_length on down to -penalty",                 \
    "buffer penalty max_length")                                                                 \
  R(repetition, "minus penalty times the fraction of n-grams of tokens that are repeated",       \
    "n penalty")                                                                                 \
  R(task, "the generated task's own checker", "pattern")                                         \
  R(think_format, "<think>...</think> comes first, once", "pattern")

#define COHORT_DECLARE_REWARD(name, description, keys) \
  RewardFn make_##name(const RewardConfig& config, const Task* task);
#define COHORT_NO_REWARD(name, description, keys)
COHORT_REWARDS(COHORT_DECLARE_REWARD, COHORT_NO_REWARD)
#undef COHORT_DECLARE_REWARD
#undef COHORT_NO_REWARD

// The program of the reward `code` and of the tool `python`, with the keys of `config`. Throws
// InputError if it is not installed.
ProgramConfig code_program(const ProgramConfig& config, const CodeConfig& code);
// Logs the sandbox that an answer of that program names. `name`: of what uses it.
void log_sandbox(const std::string& name, const CodeConfig& code, const std::string& sandbox);

// Finds the answer in a text: group 1 of the pattern's last match (the whole match if the pattern
// has no group), or the whole text if the pattern is empty.
class AnswerFinder {
 public:
  // Throws InputError for a bad pattern.
  explicit AnswerFinder(const std::string& pattern);
  // Returns nullopt if the pattern does not match.
  std::optional<std::string> find(std::string_view text) const;

 private:
  std::shared_ptr<const Regex> regex_;  // null: no pattern
};

}  // namespace cohort
