// The sampling of completions under a run's configuration.
#pragma once

#include <set>
#include <string>

#include "data/data_check.h"
#include "rl/engine/rollout.h"
#include "text/chat.h"

namespace cohort {

// The configuration that samples completions of a run's problems: `sampling`, which for
// conversations also stops at the end of a turn.
SamplingConfig sampling_for(SamplingConfig sampling, const DataConfig& data,
                            const Tokenizer& tokenizer);

// Makes sampling stop at the end of the assistant's turns.
void add_end_of_turn(SamplingConfig& sampling, const ChatFormat::EndOfTurn& end);

// `sampling` with the values of the model's generation_config.json at `path`, but for the fields
// that are `given`. Logs a warning that names the fields that it does not follow. Throws
// InputError naming the file and the field for values that cannot be followed.
SamplingConfig recommended_sampling(SamplingConfig sampling, const std::set<std::string>& given,
                                    const std::string& path, const Tokenizer& tokenizer,
                                    int64_t vocab_size);

// Throws InputError if the configuration is impossible for problems whose shortest prompt has
// `shortest_prompt` tokens, under a model of this context. Text (pretrain) has no problems.
void check_sampling(const SamplingConfig& sampling, TrainerType trainer, const Tokenizer& tokenizer,
                    int64_t shortest_prompt, int64_t context, ContextLimit limit);

}  // namespace cohort
