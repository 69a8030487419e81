// `cohort sample`: samples completions of problems, scores them, and writes those that are kept as
// lines that `trainer: sft` or `trainer: dpo` reads. The lines of a text are
//   {"prompt": "...", "completion": "...", "rewards": {"math": 1, ..., "sum": 1}}
// and those of a conversation have lists of messages in place of both texts, as TRL has them, with
// the template variables `tools` and `chat_template_kwargs` where there are any. A pair has
// `chosen` and `rejected`, `chosen_rewards` and `rejected_rewards`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "job/checkpoint.h"
#include "job/config.h"

namespace cohort {

// The lines of a problem: those of all completions that are kept, of the one with the largest sum
// of rewards, or that one as chosen and the completion with the smallest sum as rejected.
enum class SampleChoice : uint8_t { kAll, kBest, kPairs };

struct SampleRequest {
  std::string problems;  // a file like data.jsonl.path
  std::string output;    // a ResumableFile
  int64_t num = 1;       // completions sampled per problem
  // Conditions "NAME OP NUMBER" on a reward, or on "sum", their weighted sum. A completion is kept
  // if all hold. A reward that does not apply fulfils none.
  std::vector<std::string> keep;
  int64_t most = 0;       // completions kept per problem at most, the first ones; 0: all
  bool distinct = false;  // keeps only the first of equal completions of a problem
  SampleChoice choice = SampleChoice::kAll;
};

// Samples by the last stage of `plan`, with its rewards, seed, sampling and environment, and
// appends the lines of whole problems in their order to request.output, which a further call
// continues. Its bytes do not depend on concurrency, on the number of problems that are sampled at
// a time (prompts_per_step), or on where a call has ended. Truncated completions are never kept:
// training would teach an end that the model has not sampled; nor are those that are not UTF-8.
//
// Returns the numbers of "problems", of their "completions", of those "kept" (or pairs), of
// problems "solved" by a completion that fulfils the conditions, and of completions that are
// "truncated" or "failed": the environment or a reward has. Throws InputError naming the flag or
// the line, and Error if several problems in a row have no score or a line cannot be written.
Json sample_problems(const RunPlan& plan, const LoadedModel& loaded, const SampleRequest& request);

}  // namespace cohort
