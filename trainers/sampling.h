// The sampling of completions under a run's configuration.
#pragma once

#include "data/data_config.h"
#include "rl/engine/rollout.h"
#include "text/chat.h"

namespace cohort {

// The configuration that samples completions of a run's problems: `sampling`, which for
// conversations also stops at the end of a turn.
SamplingConfig sampling_for(SamplingConfig sampling, const DataConfig& data,
                            const Tokenizer& tokenizer);

// Makes sampling stop at the end of the assistant's turns.
void add_end_of_turn(SamplingConfig& sampling, const ChatFormat::EndOfTurn& end);

// Throws InputError if the configuration is impossible for problems whose shortest prompt has
// `shortest_prompt` tokens, under a model of this context. Text (pretrain) has no problems.
void check_sampling(const SamplingConfig& sampling, TrainerType trainer, const Tokenizer& tokenizer,
                    int64_t shortest_prompt, int64_t context);

}  // namespace cohort
