#include "trainers/sampling.h"

#include "data/chat_examples.h"

namespace cohort {

SamplingConfig sampling_for(SamplingConfig sampling, const DataConfig& data,
                            const Tokenizer& tokenizer) {
  if (data.is_chat())
    add_end_of_turn(sampling, chat_format(data, tokenizer).end_of_turn(tokenizer));
  return sampling;
}

void add_end_of_turn(SamplingConfig& sampling, const ChatFormat::EndOfTurn& end) {
  if (end.token)
    sampling.stop_tokens.push_back(*end.token);
  else if (!end.text.empty())
    sampling.stop_strings.push_back(end.text);
}

void check_sampling(const SamplingConfig& sampling, TrainerType trainer, const Tokenizer& tokenizer,
                    int64_t shortest_prompt, int64_t context) {
  if (trainer == TrainerType::kPretrain) return;
  check_sampling_tokens(sampling, tokenizer, tokenizer.vocab_size());
  const int64_t length = sampling.max_completion_length, limit = context - shortest_prompt;
  if (trainer == TrainerType::kGrpo && length > limit)
    throw InputError(
        str("max_completion_length: ", length, " tokens fit after no prompt: the shortest has ",
            shortest_prompt, ", the model's context is ", context,
            "; hint: max_completion_length=", limit, " at most, or a larger model.context"));
}

}  // namespace cohort
