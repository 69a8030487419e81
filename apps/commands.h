// The command line, and its sub-commands, called with parsed options. Each returns the exit code.
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "job/checkpoint.h"
#include "job/preview.h"
#include "job/replay.h"
#include "job/report.h"
#include "job/sample_problems.h"
#include "job/training.h"
#include "text/tokenizer.h"

namespace cohort::apps {

// kBadInput: InputError. kPeerFailed: this rank ended because another one failed. kHung: it made no
// progress.
inline constexpr int kOk = 0, kFailed = 1, kBadInput = 2, kPeerFailed = 3, kHung = 4,
                     kInterrupted = 130;

// Runs `cohort ARGUMENT...` in this process, whose signal handlers it replaces, and returns the
// exit code. `program`: a command that does so in another process, which `train --gpus` starts.
int run_command(std::vector<std::string> program, std::span<const std::string> arguments);
// That program.
std::vector<std::string>& own_program();

// When resuming, `config` is the first of the overrides.
struct TrainOptions : TrainRequest {
  int gpus = 0;  // > 0: one process for each of N GPUs of this machine
  // With `gpus`: starts of all processes, from the newest checkpoint, after one has failed.
  int restarts = 0;
};
// Installs the signal handlers of apps/signals.h.
int train(const TrainOptions& options);

struct CheckOptions {
  std::string config;
  std::vector<std::string> overrides;
  int gpus = 0;   // > 0: checks for `train --gpus`; needs no GPUs
  int hosts = 0;  // with `gpus`: those that share the GPUs evenly; 0: one
  // Plans for this GPU of gpu_named() instead of for this machine.
  std::optional<std::string> gpu;
  bool full = false;  // prints texts of the examples in full, not excerpts
};
int check(const CheckOptions& options);

// Device and dtype of a model's computation, and the folder of an adapter's base model.
struct ComputeOptions {
  std::string device = "cpu";
  DType dtype = DType::kF32;
  std::string base;                                   // empty: the one that find_base() finds
  std::optional<kernels::WeightFormat> weights = {};  // as the argument `format` of load_model()
};
// A model, and how it is computed.
struct ModelOptions {
  std::string model;  // a folder, checkpoint or run directory
  ComputeOptions compute;
};
// Loads the model and the tokenizer of a folder, checkpoint or run directory.
LoadedModel load(const std::string& path, const ComputeOptions& compute);
// Writes text to stdout or stderr, with escape_controls() if that is a terminal, unless `raw`.
// All text of a model, a file, an argument or another program is written by these functions.
void print(std::FILE* stream, std::string_view text, bool raw = false);
// Writes to stdout and flushes, so that a closed pipe is noticed. Throws Error if that fails.
void print_now(std::string_view text, bool raw = false);
// Reads a line of standard input, without its end. Returns false at the end of the input. Throws
// InputError if it cannot be read.
bool read_line(std::string& line);
// A function that returns the next of a command's texts, or without any the next line of standard
// input, as read_line() does.
std::function<bool(std::string&)> text_source(std::vector<std::string> texts);
// Writes help to stdout, wrapped at the width of a terminal, which counts as at least 40 columns.
// Other readers get whole lines.
void print_help(const std::string& text);
// Writes the line of an error to stderr, without the middle of a long message.
void print_error(const std::string& message);
// Prints a row of a table.
void print_row(const std::string& name, const std::string& value);
// The progress of a run on the console: a progress bar with the time left if standard error is a
// terminal, else plain lines. The bar is truncated to the terminal's width. Messages are also
// written to the log file.
std::unique_ptr<Reporter> make_console();

// Throws InputError if the device of a stage is not `cuda`, which the option `name` needs.
void expect_cuda(const RunPlan& plan, const std::string& name = "--gpus");
// Also if this process is a rank of several, or the machine has fewer than `count` GPUs.
void expect_gpus(const RunPlan& plan, int count, const std::string& name = "--gpus");

// Options of sampling. A key that is not given has the value of the model's generation_config.json.
struct SamplingOptions {
  SamplingConfig config;
  std::set<std::string> given;  // fields of generation_config.json
};

struct GenerateOptions : ModelOptions {
  std::vector<std::string> prompts;  // empty: the lines of standard input
  SamplingOptions sampling;
  // best_of completions per prompt are sampled (0: num), and the num with the largest mean token
  // log-prob are printed.
  int64_t num = 1, best_of = 0, seed = 1;
  // Form of a prompt: text, a JSON string, a user's message as in chat(), or a JSON object whose
  // fields fill data.jsonl.prompt or data.jsonl.messages of `config`.
  enum class Input { kText, kJson, kMessage, kFields } input = Input::kText;
  std::string config;  // with Input::kFields: a configuration file; empty: that of the model's run
  // NAME=DIR: each prompt is completed with each of these adapters of the model.
  std::vector<std::string> adapters;
  bool json = false;  // prints completions as JSON lines
  bool raw = false;   // see print()
};
int generate(const GenerateOptions& options);

// The model has a chat template.
struct ChatOptions : ModelOptions {
  std::string system;           // the system message; empty: the run's, if any
  std::string template_kwargs;  // template variables, a JSON object; empty: the run's
  SamplingOptions sampling;
  int64_t seed = 1;
  bool raw = false;  // see print()
};
// A conversation over standard input and output, until the end of the input.
int chat(const ChatOptions& options);

// Makes prompts conversations of a user's message, and `sampling` that of chat().
void render_messages(const GenerateOptions& options, const LoadedModel& loaded,
                     std::vector<Example>& prompts, SamplingConfig& sampling);

struct LogprobsOptions : ModelOptions {
  std::vector<std::string> texts;  // empty: the lines of standard input
  double temperature = 1;
  bool eos = false;  // appends the end-of-sequence token to each text
};
int logprobs(const LogprobsOptions& options);

// Commands that read texts and print a JSON line for each.
struct EncodeOptions : ModelOptions {
  std::vector<std::string> texts;  // empty: the lines of standard input
  bool json_input = false;         // a text is a JSON string, or {"text": ..., "text_pair": ...}
  int64_t top = 5;                 // (fill-mask)
  // The others are for embed.
  std::string pooling;    // mean, cls or last; empty: that of the folder, or the model's kind
  bool normalize = true;  // false: not even if the folder says so
  std::string prompt;     // its name; empty: the default one of the folder
  std::string output;     // a file .npy of all embeddings, instead of lines; empty: none
};
// Prints the most likely tokens of each mask token.
int fill_mask(const EncodeOptions& options);
// Prints the label and the probabilities of all labels.
int classify(const EncodeOptions& options);
// Prints or writes embeddings.
int embed_texts(const EncodeOptions& options);

// ComputeOptions are for the memory estimate.
struct InspectOptions : ModelOptions {
  int64_t context = 0;  // tokens of a sequence; 0: 4,096, or the model's context if smaller
};
// Prints a model's architecture, parameters, memory, tokenizer and chat template.
int inspect(const InspectOptions& options);

struct ExportOptions {
  std::string model;    // a folder, checkpoint or run directory
  std::string output;   // a new or empty folder
  std::string dtype;    // "bf16", "f16" or "f32"; empty: the one that was trained
  std::string base;     // as ComputeOptions::base
  bool merged = false;  // writes the model that an adapter and its base make together
};
// Writes a model alone, as a folder of Hugging Face's, or an adapter alone, as one of PEFT's.
// SIGINT ends it without a trace.
int export_folder(const ExportOptions& options);

// A model, and the configuration by which it is asked.
struct RunOptions {
  std::string model;   // a checkpoint or run directory
  std::string config;  // a file with data and rewards; empty: that of the model's run
  std::string base;    // as ComputeOptions::base
  std::vector<std::string> overrides;  // key=value
};
struct EvalOptions : RunOptions {
  std::string pass_rates;  // output file of problems with pass rates; empty: none
  // Allows pass_rates for the problems of data.jsonl.eval_path; a curriculum on the result would
  // train on test problems.
  bool force = false;
};
int evaluate(const EvalOptions& options);

struct SampleOptions : RunOptions {
  SampleRequest request;
};
// Writes completions of problems with their rewards, and prints their counts.
int sample(const SampleOptions& options);

struct TokenizerOptions {
  std::string folder;  // has the tokenizer's files
  SpecialTokens special_tokens = SpecialTokens::kAdd;
  SpecialText special_text = SpecialText::kShow;
  bool raw = false;  // see print()
};
// Converts JSON strings on standard input, one per line, to lists of ids, and back.
int tokenizer_encode(const TokenizerOptions& options);
int tokenizer_decode(const TokenizerOptions& options);

struct RenderTemplateOptions {
  std::string path;     // a template, or a Hugging Face folder that has one
  std::string context;  // a JSON file of the variables
  std::string now;      // time of strftime_now(), e.g. 2025-07-10T12:00:00; empty: the clock
  bool raw = false;     // see print()
};
// Prints the rendered template, and nothing else.
int render_template(const RenderTemplateOptions& options);

struct TokenizerTrainOptions {
  std::vector<std::string> files;
  std::string output;                // a folder, created if missing
  std::string pattern = "qwen";      // one of split_pattern_names()
  std::vector<std::string> special;  // empty: <|endoftext|>
  int64_t vocab_size = 32000;
};
std::vector<std::string> split_pattern_names();
int tokenizer_train(const TokenizerTrainOptions& options);

struct ReportOptions {
  std::vector<std::string> runs;  // directories of runs or stages
  std::string output;             // an HTML file; empty: report.html in the first run's directory
};
// Writes an HTML page that shows and compares runs.
int report(const ReportOptions& options);

struct ReplayCommand : ReplayOptions {
  std::optional<int64_t> token;  // prints the token at this position of the completion alone
  bool raw = false;              // see print()
};
// Replays steps of a GRPO run, and prints the completion that is asked for. Returns kFailed if a
// step differs from its record.
int replay(const ReplayCommand& options);

// Checks the gradient of every op (or of those named `op`) and prints a table.
int gradcheck(const std::string& op);

}  // namespace cohort::apps
