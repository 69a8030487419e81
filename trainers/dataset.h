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
  std::string fingerprint;  // file_checksum() of the file; empty: a generated task
};

// Loads what config.data says. `tokenizer`: of the model the run starts from; nullptr: made from
// the data. Throws InputError for missing, empty or malformed data, a file that is not the one of
// data.fingerprint, or text the tokenizer has no token for.
Dataset load_dataset(const TrainConfig& config, std::unique_ptr<Tokenizer> tokenizer);

// Prompt and solution with end of sequence; the solution and the end are learned. Throws InputError
// if the prompt is empty, or all is longer than the context by more than the last target.
TokenSequence supervised_sequence(const Example& example, const Tokenizer& tokenizer,
                                  int64_t context);

// Tokens of the longest prompt, and of what is trained on: a window of text; prompt, solution and
// end of sequence (sft); the prompt (grpo).
struct DataLengths {
  int64_t longest_prompt = 0, longest_sequence = 0;
  double mean_sequence = 0;
};
// Checks the data against a model's context, so that a bad example is an error now and not in the
// middle of a run: all of a finite set, the first 1,000 problems of an endless one. Throws
// InputError naming the first example that is empty, has a character without a token, or is too
// long, or the text if it is shorter than a window.
DataLengths check_data(const TrainConfig& config, const Dataset& data, int64_t context);

}  // namespace cohort
