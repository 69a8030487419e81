// The data of a run: tokenizer, training and held-out problems or token streams.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "data/packing.h"
#include "data/tokenizer.h"
#include "trainers/config.h"

namespace cohort {

struct Dataset {
  std::unique_ptr<Tokenizer> tokenizer;
  const Task* task = nullptr;                          // of generated problems
  std::unique_ptr<ExampleSet> train;                   // problems (sft, grpo)
  std::vector<Example> held_out;                       // all there are, until they are checked
  int64_t held_out_size = 0;                           // how many that was
  std::vector<int32_t> train_tokens, held_out_tokens;  // text (pretrain)
  std::string fingerprint;  // file_checksum() of the files; empty: a generated task
};

// Loads what config.data says. `tokenizer`: of the model the run starts from; nullptr: made from
// the data. Throws InputError for missing, empty or malformed data, a file that is not the one of
// data.fingerprint, or text the tokenizer has no token for.
Dataset load_dataset(const TrainConfig& config, std::unique_ptr<Tokenizer> tokenizer);

// A problem that has only what it asks, an object like a line of the data: the prompt that the
// model is given in training. Throws InputError naming `where`.
Example prompt_of(const TrainConfig& config, const Tokenizer& tokenizer, const Json& fields,
                  const std::string& where);

// How to sample completions of its problems: as configured, and until a turn ends.
SamplingConfig sampling_for(const TrainConfig& config, const Tokenizer& tokenizer);

// Prompt and solution with end of sequence; the solution and the end are learned. What is longer
// than the context by more than the last target is cut at its end if `too_long` says so. Throws
// InputError if it is not to be cut, or if the prompt is empty.
TokenSequence supervised_sequence(const Example& example, const Tokenizer& tokenizer,
                                  int64_t context, TooLong too_long = TooLong::kError);

// Tokens of the shortest and the longest prompt, and of what is trained on: a window of text;
// prompt, solution and end of sequence (sft); the prompt (grpo).
struct DataLengths {
  int64_t shortest_prompt = 0, longest_prompt = 0, longest_sequence = 0;
  double mean_sequence = 0;
  std::string too_long;  // what became of problems that are too long; empty: there are none
};
// Makes the data fit a model's context, so that a bad example is an error now and not in the middle
// of a run: all of a finite set, the first 1,000 problems of an endless one. Problems that are too
// long are cut or left out as config.data.too_long says, and the first config.eval.size of the
// held-out problems stay. Throws InputError naming the first example that is empty or has a
// character without a token; the longest that is too long; the text if it is shorter than a window;
// or a key: one that holds everything out, or one of sampling that asks for what cannot be.
DataLengths check_data(const TrainConfig& config, Dataset& data, int64_t context);
// The same for the held-out problems alone, where nothing is to be trained. Returns
// DataLengths::too_long.
std::string check_held_out(const TrainConfig& config, Dataset& data, int64_t context);

// Logs which problems are used where that is not all or not as many as asked for.
void log_what_is_used(const TrainConfig& config, const Dataset& data, const std::string& too_long);

}  // namespace cohort
