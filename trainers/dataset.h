// The data of a run: tokenizer, training and held-out problems or token streams.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "data/loader.h"
#include "data/packing.h"
#include "data/tokenizer.h"
#include "trainers/chat_examples.h"
#include "trainers/config.h"
#include "trainers/token_stream.h"

namespace cohort {

struct Dataset {
  std::unique_ptr<Tokenizer> tokenizer;
  const Task* task = nullptr;  // of generated problems
  // Problems (sft, grpo): to train on, those of data.jsonl.path's entries one after the other; and
  // the held-out ones.
  std::unique_ptr<ExampleSet> train, held_out_set;
  std::vector<int64_t> source_sizes;  // problems of each entry
  std::shared_ptr<const ChatRenderer>
      chat;  // that both sets are rendered by; null: no conversations
  // What check_data() has made of them: those of the held-out ones that are evaluated, and by which
  // number data.curriculum sorts each of the training problems.
  std::vector<Example> held_out;
  std::vector<float> difficulty;
  // Text (pretrain): that of data.text's entries, with the share of each in the windows.
  std::vector<TokenStream> train_text;
  std::vector<double> text_weights;
  TokenStream held_out_text;
  std::string fingerprint;  // file_checksum() of the files; empty: a generated task
};

// Loads what config.data says. `tokenizer`: of the model the run starts from; nullptr: made from
// the data. Throws InputError for missing, empty or malformed data, a file that is not the one of
// data.fingerprint, or text the tokenizer has no token for.
Dataset load_dataset(const TrainConfig& config, std::unique_ptr<Tokenizer> tokenizer);

// The i-th window of context + 1 tokens to train on, addressed by (seed, i).
struct TextWindow {
  const TokenStream& tokens;
  int64_t begin;
};
TextWindow text_window(const Dataset& data, int64_t context, uint64_t seed, int64_t i);

// The order of the training problems, which check_data() has checked. A curriculum goes once
// through all that the run will see: `planned_steps` is TrainState::planned_steps.
MixedOrder make_order(const TrainConfig& config, const Dataset& data,
                      std::span<const int64_t> planned_steps = {});

// A problem that has only what it asks, an object like a line of the data: the prompt that the
// model is given in training. Throws InputError naming `where`.
Example prompt_of(const TrainConfig& config, const Tokenizer& tokenizer, const Json& fields,
                  const std::string& where);

// How to sample completions of its problems: as configured, and until a turn ends.
SamplingConfig sampling_for(const TrainConfig& config, const Tokenizer& tokenizer);

// Stops sampling where the assistant's turns end.
void add_end_of_turn(SamplingConfig& sampling, const ChatFormat::EndOfTurn& end);

// Prompt and solution, encoded as one text, and the end of sequence; of a rendered conversation the
// text alone.
std::vector<int32_t> supervised_tokens(const Example& example, const Tokenizer& tokenizer);

// These tokens; what follows the prompt's is in the loss mask, of a rendered conversation
// `learned`. What is longer than the context by more than the last target is cut at its end if
// `too_long` says so. Throws InputError if it is not to be cut, or if the prompt is empty.
TokenSequence supervised_sequence(const Example& example, const Tokenizer& tokenizer,
                                  int64_t context, TooLong too_long = TooLong::kError);

}  // namespace cohort
