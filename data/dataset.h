// The data of a run: tokenizer, training and held-out problems or token streams.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "data/chat_examples.h"
#include "data/data_config.h"
#include "data/field_template.h"
#include "data/loader.h"
#include "data/masking.h"
#include "data/packing.h"
#include "data/token_stream.h"
#include "text/tokenizer.h"

namespace cohort {

// The parts of a stage's configuration that its data depend on.
struct DataSections {
  const DataConfig& data;
  const BatchConfig& batch;
  uint64_t seed = 0;                                 // for the order and for generated problems
  int64_t max_completion_length = 0;                 // tokens
  int64_t eval_size = 0, eval_tokens = 0;            // held-out problems and tokens of text; 0: all
  std::string fingerprint_key = "data.fingerprint";  // the override that accepts other files
  int64_t image_size = 0;                            // model.image_size
};

struct Dataset {
  std::unique_ptr<Tokenizer> tokenizer;
  const Task* task = nullptr;  // generates the problems; null: problems from files
  // Problems (sft, grpo, classify, dpo): the training problems, those of data.jsonl.path's entries
  // concatenated;
  // and the held-out ones.
  std::unique_ptr<ExampleSet> train, held_out_set;
  std::vector<int64_t> source_sizes;  // problems of each entry
  // Renders both sets; null: no conversations.
  std::shared_ptr<const ChatRenderer> chat;
  // Set by check_data(): the held-out problems that are evaluated, and the sort key of each
  // training problem for data.curriculum.
  std::vector<Example> held_out;
  std::vector<float> difficulty;
  // Text (pretrain, mlm): data.text's entries, with the weight of each in the windows.
  std::vector<TokenStream> train_text;
  std::vector<double> text_weights;
  TokenStream held_out_text;
  std::string fingerprint;  // file_checksum() of the files; empty: a generated task
};

// kHeldOut, for evaluation alone: the training data are not read, and `train` and `train_text` are
// empty, where data.jsonl.eval_path or data.eval_text has all that is held out.
enum class DataParts { kAll, kHeldOut };
// Loads the data of config.data. `tokenizer` is that of the initial model; nullptr: built from the
// data. Throws InputError for missing, empty or malformed data, a file that does not match
// config.data.fingerprint, or text the tokenizer has no token for.
Dataset load_dataset(const DataSections& config, std::unique_ptr<Tokenizer> tokenizer,
                     DataParts parts = DataParts::kAll);

// Tokens of a window of text that give `context` inputs: one more, the last target (pretrain), or
// those that the tokenizer puts around a text less (mlm). Throws InputError if none are left.
int64_t window_length(TrainerType trainer, const Tokenizer& tokenizer, int64_t context);
// The i-th window of `length` tokens to train on, addressed by (seed, i).
struct TextWindow {
  const TokenStream& tokens;
  int64_t begin;
};
TextWindow text_window(const Dataset& data, int64_t length, uint64_t seed, int64_t i);
// (mlm) A window of text between the tokens that the tokenizer puts around a text, with the masked
// tokens of Masking::apply() as labels.
TokenSequence masked_sequence(std::span<const int32_t> window, const Tokenizer& tokenizer,
                              const Masking& masking, int64_t step, int64_t index);

// The order of the training problems, after check_data(). A curriculum spans all steps of the run:
// `planned_steps` is TrainState::planned_steps.
MixedOrder make_order(const DataSections& config, const Dataset& data,
                      std::span<const int64_t> planned_steps = {});

// The training prompt of a problem without a solution, given as an object like a line of the data.
// Throws InputError naming `where`.
Example prompt_of(const DataConfig& config, const Tokenizer& tokenizer, const Json& fields,
                  const std::string& where);

// The tokens of a problem's prompt with another text in place of it, or of the last message of the
// user in a conversation: `text` over the problem's fields, where {prompt} is what it replaces, and
// {solution} and {answer} are the problem's. Throws InputError naming the problem for a field that
// is missing.
std::vector<int32_t> prompt_with(const FieldTemplate& text, const Example& example,
                                 const Dataset& data);

// Prompt and solution, encoded as one text, and the end of sequence; only the text for a rendered
// conversation.
std::vector<int32_t> supervised_tokens(const Example& example, const Tokenizer& tokenizer);

// These tokens with their loss mask: the tokens after the prompt, or `loss_spans` of a rendered
// conversation. Sequences of more than context + 1 tokens are truncated at their end if `too_long`
// is kTruncate. Throws InputError if one is too long otherwise, or if the prompt is empty.
TokenSequence supervised_sequence(const Example& example, const Tokenizer& tokenizer,
                                  int64_t context, TooLong too_long = TooLong::kError);
// (dpo) The supervised_sequence() of a pair's chosen answer, then of its rejected one, as group
// `index` with the prefix that both begin with. Their own indices are 2 index and 2 index + 1.
std::array<TokenSequence, 2> pair_sequences(const Example& example, const Tokenizer& tokenizer,
                                            int64_t context, TooLong too_long, int64_t index);

}  // namespace cohort
