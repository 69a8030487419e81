// judge: a model behind an OpenAI-style server says how good a completion is. The request is POSTed
// to `url`, the whole address (".../v1/chat/completions"):
//   {"model": "...", "messages": [{"role": "system", ...}, {"role": "user", "content": "..."}],
//    "temperature": 0, "max_tokens": 64, "seed": 0}
// The user's message is the template `prompt`, over the line's fields and {completion}, {prompt},
// {answer} and {transcript}, the messages after the prompt with their roles. The score is a number
// in the text of the answer, choices[0].message.content: group 1 of the last match of `pattern`, or
// `field` of the JSON object that the text has. It is mapped from `scale` to 0..1; outside of the
// scale it is no score. With several votes, of the seeds 0, 1, ..., the reward is their mean.
#pragma once

#include "data/field_template.h"
#include "rl/rewards/rewards.h"

namespace cohort {

class Judge {
 public:
  // Throws InputError naming the key.
  explicit Judge(const RewardConfig& config);
  // Throws InputError for a field that the line does not have.
  Json request(const RewardInput& in, int64_t vote) const;
  // The score in 0..1, and the text of an answer. Throws InputError saying what is wrong with it.
  double score(const Json& answer, std::string& text) const;

 private:
  // The judgement as written; throws as score() does.
  std::string judgement(const std::string& text) const;

  const JudgeConfig config_;
  const FieldTemplate prompt_;
  const AnswerFinder finder_;
};

}  // namespace cohort
