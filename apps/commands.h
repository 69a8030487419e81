// The sub-commands of `cohort`: thin functions that parse nothing. Each returns the exit code;
// InputError becomes 2 in main.cpp.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "data/tokenizer.h"
#include "trainers/checkpoint.h"
#include "trainers/preview.h"

namespace cohort::apps {

// kPeerFailed: this rank has ended because another one failed.
inline constexpr int kOk = 0, kFailed = 1, kBadInput = 2, kPeerFailed = 3, kInterrupted = 130;

struct TrainOptions {
  std::string config;                  // empty when resuming
  std::string resume;                  // a run directory
  std::vector<std::string> overrides;  // key=value
  int gpus = 0;                        // > 0: that many, one process each, all of this machine
  int64_t profile = 0;                 // steps that are traced
};
// Takes over the signals of the process (apps/signals.h).
int train(const TrainOptions& options);

struct CheckOptions {
  std::string config;
  std::vector<std::string> overrides;
  int gpus = 0;  // > 0: as `train --gpus` would, wherever those are
  enum class Prompts { kExcerpt, kFull } prompts = Prompts::kExcerpt;
};
int check(const CheckOptions& options);

// Where a model computes.
struct Placement {
  std::string device = "cpu";
  DType dtype = DType::kF32;
};
// The model and the tokenizer of a folder, checkpoint or run directory.
LoadedModel load(const std::string& path, const Placement& place);
// The configuration of the run that a model belongs to: of the nearest directory above it that has
// one.
std::optional<std::string> find_config(const std::string& model);

// What each stage of a plan needs of memory in each of so many processes: one line per stage, each
// after a line break.
std::string memory_plan(const RunPlan& plan, const std::vector<StagePreview>& stages,
                        int64_t processes);
// Throws InputError if a stage is for another device than --gpus needs.
void expect_cuda(const RunPlan& plan);

struct GenerateOptions {
  std::string model;  // a checkpoint or run directory
  Placement place;
  std::vector<std::string> prompts;  // empty: the lines of standard input
  SamplingConfig sampling;
  std::optional<double> temperature;  // none: 1, or that of the run whose data.jsonl is used
  // Of the best_of completions of a prompt that are drawn (0: num), num are printed: those whose
  // tokens have the largest mean log-prob.
  int64_t num = 1, best_of = 0, seed = 1;
  // What a prompt is: its text, the same as a JSON string, or a JSON object whose fields fill
  // data.jsonl.prompt or data.jsonl.messages of the model's run.
  enum class Input { kText, kJson, kFields } input = Input::kText;
  enum class Output { kText, kJson } output = Output::kText;
};
int generate(const GenerateOptions& options);

struct ChatOptions {
  std::string model;  // a folder, checkpoint or run directory with a chat template
  Placement place;
  std::string system;           // the first message; empty: none, or that of the model's run
  std::string template_kwargs;  // variables of the template, a JSON object; empty: as `system`
  // None: what the folder's generation_config.json recommends, else as `generate`.
  std::optional<double> temperature, top_p;
  std::optional<int64_t> top_k;
  int64_t max_tokens = 2048, seed = 1;
};
// A conversation over standard input and output; ends with the input.
int chat(const ChatOptions& options);

struct LogprobsOptions {
  std::string model;
  Placement place;
  std::vector<std::string> texts;  // empty: the lines of standard input
  double temperature = 1;
  enum class End {
    kNone,
    kEos
  } end = End::kNone;  // kEos: the end-of-sequence token follows each text
};
int logprobs(const LogprobsOptions& options);

struct InspectOptions {
  std::string model;    // a folder, checkpoint or run directory
  Placement place;      // for the memory that it would need
  int64_t context = 0;  // tokens of a sequence; 0: 4,096, or the model's context if that is less
};
// Prints what a model is, what it needs, and what its tokenizer and template do.
int inspect(const InspectOptions& options);

struct EvalOptions {
  std::string model;       // a checkpoint or run directory
  std::string config;      // empty: the run's own
  std::string pass_rates;  // file for the problems with theirs; empty: none
  // Permission to write the problems of data.jsonl.eval_path with their pass rates, by which a
  // curriculum would train on them.
  enum class TestFiles { kRefuse, kWrite } test_files = TestFiles::kRefuse;
  std::vector<std::string> overrides;  // key=value
};
int evaluate(const EvalOptions& options);

struct TokenizerOptions {
  std::string folder;  // of a tokenizer's files
  SpecialTokens added = SpecialTokens::kAdd;
  SpecialText shown = SpecialText::kShow;
};
// JSON strings of standard input, one a line, as lists of ids, and back.
int tokenizer_encode(const TokenizerOptions& options);
int tokenizer_decode(const TokenizerOptions& options);

struct RenderTemplateOptions {
  std::string path;     // a template, or a Hugging Face folder that has one
  std::string context;  // a JSON file: the variables
  std::string now;      // what strftime_now() tells, as 2025-07-10T12:00:00; empty: the clock
};
// Prints what the template makes of its variables, and nothing else.
int render_template(const RenderTemplateOptions& options);

struct TokenizerTrainOptions {
  std::vector<std::string> files;
  std::string output;                // a folder, made if it is not there
  std::string pattern = "qwen";      // one of split_pattern_names()
  std::vector<std::string> special;  // none: <|endoftext|>
  int64_t vocab_size = 32000;
};
std::vector<std::string> split_pattern_names();
int tokenizer_train(const TokenizerTrainOptions& options);

struct ReportOptions {
  std::vector<std::string> runs;  // run directories, or those of stages
  std::string output;             // an HTML file; empty: report.html in the first run's directory
};
// Writes a page with what there is to see of runs, side by side.
int report(const ReportOptions& options);

// Checks the gradient of every op (or of those named `op`) and prints a table.
int gradcheck(const std::string& op);

}  // namespace cohort::apps
