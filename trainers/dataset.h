// The data of a run: tokenizer, training and held-out problems or token streams.
#pragma once

#include <memory>
#include <vector>

#include "data/packing.h"
#include "data/tokenizer.h"
#include "trainers/config.h"

namespace cohort {

struct Dataset {
  std::unique_ptr<Tokenizer> tokenizer;
  const Task* task = nullptr;         // of generated problems
  std::unique_ptr<ExampleSet> train;  // problems (sft, grpo)
  std::vector<Example> held_out;
  std::vector<int32_t> train_tokens, held_out_tokens;  // text (pretrain)
};

// Loads what config.data says. `tokenizer`: of the model the run starts from; nullptr: made from
// the data. Throws InputError for missing, empty or malformed data, or text the tokenizer has no
// token for.
Dataset load_dataset(const TrainConfig& config, std::unique_ptr<Tokenizer> tokenizer);

// Prompt and solution with end of sequence; the solution and the end are learned. Throws InputError
// if it is longer than the context by more than the last target.
TokenSequence supervised_sequence(const Example& example, const Tokenizer& tokenizer,
                                  int64_t context);

}  // namespace cohort
