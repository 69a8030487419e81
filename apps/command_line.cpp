// Parses the arguments of `cohort` and runs a sub-command; errors become exit codes.
#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <memory>
#include <new>
#include <set>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "apps/commands.h"
#include "apps/signals.h"
#include "core/log.h"
#include "core/parallel.h"
#include "core/with_cuda.h"
#include "data/example.h"
#include "distributed/communicator.h"
#include "job/config.h"
#include "rl/reward.h"

namespace cohort::apps {
namespace {

// Without this a file of the run could get the descriptor of a closed standard stream, and receive
// its output.
void open_standard_streams() {
  for (int fd = 0; fd < 3; ++fd)
    if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) < 0) _exit(kFailed);
}

std::string configuration_keys() {
  std::string text = "Configuration keys (YAML file, or key=value on the command line):\n";
  text += config_help<TrainConfig>();
  text +=
      "stages:  a list of maps of these keys: stages run in order, each from the weights of "
      "the previous one\n\nTasks (data.task):\n";
  for (const Task* task : tasks()) text += str("  ", task->name, ": ", task->description, "\n");
  text += "Rewards (rewards[].name):\n";
  for (const RewardEntry& reward : reward_table())
    text += str("  ", reward.name, ": ", reward.description, "\n");
  return text;
}

// Adds --keys, which ends the command as --help does: its other arguments may be missing.
void add_keys(CLI::App& command) {
  command.set_version_flag("--keys", configuration_keys,
                           "list the configuration keys, the tasks and the rewards, and exit");
}

// Flushes standard output, and throws Error if any output was lost.
int check_output(int code) {
  if (code != kOk) return code;
  errno = 0;
  const bool flushed = std::fflush(stdout) == 0;
  if (flushed && std::ferror(stdout) == 0) return code;
  const char* cause = flushed || errno == 0 ? "an earlier write failed" : std::strerror(errno);
  throw Error(str("cannot write to standard output: ", cause,
                  "; hint: check the free space, or the reader of the pipe"));
}

// Adds a sub-command and returns it with its options, which the parser fills. Once all arguments
// are parsed, it calls `execute` and sets `code` to the exit code.
template <class Options>
std::pair<CLI::App&, Options&> add_command(CLI::App& app, int& code, int (*execute)(const Options&),
                                           const char* name, const char* help) {
  const auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(name, help);
  command->callback([&code, options, execute] {
    std::error_code error;
    const auto folder = std::filesystem::current_path(error);
    if (folder.empty())
      throw InputError(str("the current directory cannot be determined: ", error.message(),
                           "; hint: it was removed or moved, so change to another one"));
    code = execute(*options);
  });
  return {*command, *options};
}

// Refuses NaN and infinity, too, which CLI11 takes as numbers of any range.
CLI::Validator at_least(double min) {
  const auto check = [min](const std::string& text) -> std::string {
    double value = 0;
    if (CLI::detail::lexical_cast(text, value) && value >= min && value < INFINITY) return {};
    return str("expected a finite number of at least ", format_double(min), ", got '", text, "'");
  };
  return {check, ""};
}

// Adds an option for a number. The help shows the default, unless it is 0.
template <class T>
CLI::Option* add_number(CLI::App& command, const char* name, T& value, const char* help,
                        double min = 1) {
  CLI::Option* option = command.add_option(name, value, help)->check(at_least(min));
  if (value > 0) option->capture_default_str();
  return option;
}

// Adds the options of sampling, with the ranges and the help of the configuration's keys. Those on
// the command line add the fields of generation_config.json that they replace to options.given.
void add_sampling_options(CLI::App& command, SamplingOptions& options, int64_t max_tokens,
                          const char* limited) {
  SamplingConfig& config = options.config;
  const auto replaces = [&given = options.given](CLI::Option* option,
                                                 const std::set<std::string>& fields) {
    option->each(
        [&given, fields](const std::string&) { given.insert(fields.begin(), fields.end()); });
  };
  ConfigVisitor add([&](const ConfigField& field) {
    std::string key = field.key, name = "--" + key;
    std::ranges::replace(name, '_', '-');
    double* const* real = std::get_if<double*>(&field.value);
    int64_t* const* whole = std::get_if<int64_t*>(&field.value);
    if (real == nullptr && (whole == nullptr || *whole == &config.max_completion_length)) return;
    CLI::Option* option = real != nullptr ? command.add_option(name, **real, field.help)
                                          : command.add_option(name, **whole, field.help);
    const auto [min, max] = field.range;
    option->check(at_least(min))->check(CLI::Range(min, max))->capture_default_str();
    replaces(option, {key, key.ends_with("penalty") ? key : "do_sample"});
  });
  config.visit(add);
  command.footer("Options replace what the model's generation_config.json says.");
  command.add_option("--logit-bias", config.logit_bias, "added to tokens' logits: ID:BIAS");
  replaces(command.add_option("--stop", config.stop_strings, "texts that end a completion"),
           {std::string("stop_strings")});
  config.max_completion_length = max_tokens;
  replaces(add_number(command, "--max-tokens", config.max_completion_length, limited),
           {"max_new_tokens", "max_length"});
}

// Adds a flag that sets `value` to `on`.
template <class E>
CLI::Option* add_switch(CLI::App& command, const char* name, E& value, E on, const char* help) {
  return command.add_flag_callback(
      name, [&value, on] { value = on; }, help);
}

void add_base(CLI::App& command, std::string& base) {
  command.add_option("--base", base,
                     "the folder of an adapter's base model, if it is not where the adapter says");
}

void add_compute_options(CLI::App& command, ComputeOptions& compute) {
  command.add_option("--device", compute.device, "cpu, cuda or cuda:N")->capture_default_str();
  const auto set_dtype = [&](const std::string& name) {
    compute.dtype = name == "bf16" ? DType::kBF16 : DType::kF32;
  };
  command
      .add_option_function<std::string>("--dtype", set_dtype,
                                        "f32, or bf16 (CUDA only); default: f32")
      ->check(CLI::IsMember({"f32", "bf16"}));
  add_base(command, compute.base);
  const auto set_weights = [&](const std::string& name) {
    for (const auto& [value, known] : kBaseNames)
      if (name == known) compute.weights = value;
  };
  command
      .add_option_function<std::string>(
          "--weights", set_weights,
          "weights of the linear layers: bf16 (--dtype), int8, nf4 or nf4_single; default: as "
          "trained or stored")
      ->check(CLI::IsMember({"bf16", "int8", "nf4", "nf4_single"}));
}

void add_raw(CLI::App& command, bool& raw) {
  command.add_flag("--raw", raw,
                   "print control and invisible characters unescaped to a terminal too");
}

void add_train(CLI::App& app, int& code) {
  auto [command, options] =
      add_command(app, code, train, "train", "train from a YAML file, or resume a run");
  command.add_option("config", options.config, "CONFIG.yaml");
  command.add_option("overrides", options.overrides, "key=value ...");
  CLI::Option* resume = command.add_option("--resume", options.resume, "run directory to resume");
  command
      .add_flag("--continue", options.continues,
                "resume the run in output_dir if it is there, start it there if not: for launchers "
                "that restart a command")
      ->excludes(resume);
  CLI::Option* gpus = add_number(command, "--gpus", options.gpus,
                                 "train on the first N GPUs of this machine, one process each");
  add_number(command, "--restarts", options.restarts,
             "with --gpus: start all processes again, from the newest checkpoint of the run, up to "
             "N times after one has died or failed; not after bad input or an interrupt")
      ->needs(gpus);
  add_number(command, "--profile", options.profile,
             "write a trace of N steps, starting at the third, to the run's trace.json: kernels, "
             "host, phases");
  add_keys(command);
  command.footer(configuration_keys);
}

void add_check(CLI::App& app, int& code) {
  auto [command, options] = add_command(
      app, code, check, "check",
      "validate a configuration and its data, and print sizes and memory; train nothing");
  command.add_option("config", options.config, "CONFIG.yaml")->required();
  command.add_option("overrides", options.overrides, "key=value ...; --keys lists them");
  CLI::Option* gpus = add_number(command, "--gpus", options.gpus,
                                 "check for training on N GPUs; this machine needs none");
  add_number(command, "--hosts", options.hosts, "with --gpus: hosts that share them evenly")
      ->needs(gpus);
  command.add_option("--gpu", options.gpu,
                     "plan for this GPU, which this machine need not have: rtx4090, l4, h100, ..., "
                     "or GiB=24,sm=89");
  command.add_flag("--full", options.full,
                   "print prompts, answers and solutions of the examples in full");
  add_keys(command);
}

void add_generate(CLI::App& app, int& code) {
  auto [command, options] = add_command(app, code, generate, "generate", "sample completions");
  command.add_option("model", options.model, "folder, checkpoint or run directory")->required();
  command.add_option("prompts", options.prompts, "prompts; none: one per line of standard input");
  add_sampling_options(command, options.sampling, 256, "per completion");
  add_number(command, "--num", options.num, "completions per prompt");
  add_number(command, "--best-of", options.best_of,
             "sample N completions, print the --num with the largest mean token log-prob");
  add_number(command, "--seed", options.seed, "seed of the random numbers", 0);
  add_compute_options(command, options.compute);
  command
      .add_option("--adapter", options.adapters,
                  "NAME=DIR, up to eight times: complete each prompt with each of these adapters "
                  "(LoRA) of the model, all at once")
      ->allow_extra_args(false)
      ->excludes("--base");
  command.add_flag(
      "--json", options.json,
      "one JSON line per completion: text, token ids, log-probs, stop reason (eos, stop: "
      "--stop, length: --max-tokens, context)");
  add_raw(command, options.raw);
  CLI::Option* strings =
      add_switch(command, "--json-input", options.input, GenerateOptions::Input::kJson,
                 "each prompt is a JSON string: \"two\\nlines\"");
  CLI::Option* fields =
      add_switch(command, "--template", options.input, GenerateOptions::Input::kFields,
                 "each prompt is a JSON object with the fields of the data of the model's run, "
                 "whose stop tokens, stop strings and temperature are used")
          ->excludes(strings);
  add_switch(command, "--chat", options.input, GenerateOptions::Input::kMessage,
             "each prompt is a message of a user, rendered by the model's chat template as in chat")
      ->excludes(strings)
      ->excludes(fields);
  command
      .add_option("--config", options.config,
                  "with --template: a configuration file whose data is used instead of the run's")
      ->needs(fields);
}

void add_chat(CLI::App& app, int& code) {
  auto [command, options] = add_command(
      app, code, chat, "chat",
      "chat with a model that has a chat template: a line is a message, Ctrl-C stops a "
      "reply, /new starts another conversation, /help lists the commands, Ctrl-D exits; "
      "standard input may be a pipe");
  command.add_option("model", options.model, "folder, checkpoint or run directory")->required();
  command.add_option("--system", options.system, "the system message; default: the run's");
  command.add_option("--chat-template-kwargs", options.template_kwargs,
                     "template variables, a JSON object: '{\"enable_thinking\": false}'");
  add_sampling_options(command, options.sampling, 2048, "per reply");
  add_raw(command, options.raw);
  add_number(command, "--seed", options.seed, "seed of the random numbers", 0);
  add_compute_options(command, options.compute);
}

void add_logprobs(CLI::App& app, int& code) {
  auto [command, options] =
      add_command(app, code, logprobs, "logprobs",
                  "the log-prob of every token of a text, one JSON line per text");
  command.add_option("model", options.model, "folder, checkpoint or run directory")->required();
  command.add_option("texts", options.texts, "texts; none: one per line of standard input");
  add_number(command, "--temperature", options.temperature, "of the distribution", 1e-6);
  add_compute_options(command, options.compute);
  command.add_flag("--eos", options.eos, "end each text with the end-of-sequence token");
}

// Adds a command that reads texts and prints a JSON line for each.
std::pair<CLI::App&, EncodeOptions&> add_encode(CLI::App& app, int& code,
                                                int (*execute)(const EncodeOptions&),
                                                const char* name, const char* help) {
  const auto added = add_command(app, code, execute, name, help);
  auto& [command, options] = added;
  command.add_option("model", options.model, "folder, checkpoint or run directory")->required();
  command.add_option("texts", options.texts, "texts; none: one per line of standard input");
  command.add_flag("--json-input", options.json_input,
                   "each text is a JSON string: \"two\\nlines\"; or two texts as a pair: "
                   "{\"text\": \"...\", \"text_pair\": \"...\"}");
  add_compute_options(command, options.compute);
  return added;
}

void add_encoders(CLI::App& app, int& code) {
  auto [mask, filled] = add_encode(app, code, fill_mask, "fill-mask",
                                   "the most likely tokens of each mask token ([MASK], <mask>) of "
                                   "a text, one JSON line per text");
  add_number(mask, "--top", filled.top, "tokens per mask")->check(CLI::Range(1, 1000));
  add_encode(
      app, code, classify, "classify",
      "the label of a text, or of an image by its path or data URI, and the probabilities of all "
      "labels, one JSON line each");
  auto [command, options] =
      add_encode(app, code, embed_texts, "embed",
                 "the embedding of a text, one JSON line per text, by the options or as a folder "
                 "of sentence-transformers says");
  command
      .add_option("--pooling", options.pooling,
                  "of the hidden states: their mean, cls (the first) or last; default: the "
                  "folder's, else mean, or last of a decoder")
      ->check(CLI::IsMember({"mean", "cls", "last"}));
  add_switch(command, "--no-normalize", options.normalize, false,
             "do not divide embeddings by their length");
  command.add_option("--prompt", options.prompt,
                     "name of a prompt of the folder, put before texts");
  command.add_option("--output", options.output, "write a matrix (.npy, f32) instead of lines");
}

// Adds the model of a command, and the configuration by which it is asked.
void add_run_options(CLI::App& command, RunOptions& options) {
  command.add_option("model", options.model, "folder, checkpoint or run directory")->required();
  command.add_option("overrides", options.overrides,
                     "key=value ... (eval.num_samples=16 temperature=0.7); --keys lists them");
  command.add_option("--rewards,--config", options.config,
                     "a configuration file: use its data and rewards instead of the run's");
  add_base(command, options.base);
  add_keys(command);
}

void add_eval(CLI::App& app, int& code) {
  auto [command, options] =
      add_command(app, code, evaluate, "eval",
                  "pass@1 and pass@k on held-out problems, or validation loss on text");
  add_run_options(command, options);
  command.add_option("--pass-rates", options.pass_rates,
                     "write the problems to this file, each with the fraction of correct samples, "
                     "for data.curriculum: pass_rate");
  command.add_flag("--force", options.force,
                   "with --pass-rates: allow the problems of data.jsonl.eval_path");
}

void add_sample(CLI::App& app, int& code) {
  auto [command, options] = add_command(
      app, code, sample, "sample",
      "sample completions of problems and write those that rewards select, as data for trainer: "
      "sft or dpo; a command that was killed continues its file");
  add_run_options(command, options);
  SampleRequest& request = options.request;
  command
      .add_option("--problems", request.problems,
                  "the problems, in the format of the run's data.jsonl")
      ->required();
  add_number(command, "--num", request.num, "completions sampled per problem")
      ->required()
      ->check(CLI::Range(1, 65536));
  command
      .add_option("--keep", request.keep,
                  "conditions on rewards, or on their weighted sum: \"math >= 1, sum > 1.5\"; may "
                  "be repeated, and all must hold; default: all completions with a reward")
      ->delimiter(',')
      ->allow_extra_args(false);
  CLI::Option* most =
      add_number(command, "--most", request.most, "keep the first K of a problem at most");
  command.add_flag("--distinct", request.distinct, "keep equal completions of a problem once");
  CLI::Option* best = add_switch(command, "--best", request.choice, SampleChoice::kBest,
                                 "keep the one with the largest sum of rewards of each problem");
  CLI::Option* pairs = add_switch(
      command, "--pairs", request.choice, SampleChoice::kPairs,
      "write that one as chosen, and the one with the smallest sum as rejected, where they differ");
  most->excludes(best)->excludes(pairs);
  best->excludes(pairs);
  command.add_option("--output", request.output, "the file of JSON lines")->required();
}

void add_gradcheck(CLI::App& app, int& code) {
  auto [command, op] = add_command(app, code, gradcheck, "gradcheck",
                                   "check gradients of the ops against central differences");
  command.add_option("op", op, "only this op");
}

void add_inspect(CLI::App& app, int& code) {
  auto [command, options] =
      add_command(app, code, inspect, "inspect",
                  "print a model's architecture, parameters, memory, tokenizer and chat template");
  command.add_option("model", options.model, "folder, checkpoint or run directory")->required();
  add_number(command, "--context", options.context,
             "sequence length of the memory estimate; default: 4096, or the model's context");
  add_compute_options(command, options.compute);
}

void add_export(CLI::App& app, int& code) {
  auto [command, options] = add_command(
      app, code, export_folder, "export",
      "write a model alone as a Hugging Face folder, for vLLM, SGLang, transformers, llama.cpp; an "
      "adapter (LoRA) as a folder for PEFT");
  command.add_option("model", options.model, "folder, checkpoint or run directory")->required();
  command.add_option("dir", options.output, "a new or empty folder")->required();
  command
      .add_option("--dtype", options.dtype, "bf16, f16 or f32; default: the one that was trained")
      ->check(CLI::IsMember({"bf16", "f16", "f32"}));
  command.add_flag("--merged", options.merged,
                   "write the whole model that an adapter and its base make together");
  add_base(command, options.base);
}

void add_tokenizer_train(CLI::App& app, int& code) {
  auto [command, options] = add_command(app, code, tokenizer_train, "train",
                                        "train a byte-level BPE tokenizer on text files");
  command.add_option("files", options.files, "text: files, folders, patterns (UTF-8)")->required();
  command.add_option("--output", options.output, "folder for its files")->required();
  command
      .add_option("--vocab-size", options.vocab_size, "includes the bytes and the special tokens")
      ->capture_default_str();
  command.add_option("--pattern", options.pattern, "the pattern that splits text into words")
      ->capture_default_str()
      ->check(CLI::IsMember(split_pattern_names()));
  command
      .add_option("--special", options.special,
                  "a special token; may be repeated; the first one ends a text; default: "
                  "<|endoftext|>")
      ->allow_extra_args(false);  // the next argument is a file
}

void add_tokenizer(CLI::App& app, int& code) {
  constexpr const char* kFolder = "folder of a model or a tokenizer";
  CLI::App* tokenizer = app.add_subcommand("tokenizer", "encode, decode, or train a tokenizer");
  tokenizer->require_subcommand(1);
  auto [encode, texts] =
      add_command(*tokenizer, code, tokenizer_encode, "encode",
                  "convert JSON strings on standard input, one per line, to lists of ids");
  encode.add_option("folder", texts.folder, kFolder)->required();
  add_switch(encode, "--no-special", texts.special_tokens, SpecialTokens::kNone,
             "omit the tokens that begin and end a text");
  auto [decode, ids] =
      add_command(*tokenizer, code, tokenizer_decode, "decode",
                  "convert lists of ids on standard input, one per line, to JSON strings");
  decode.add_option("folder", ids.folder, kFolder)->required();
  add_switch(decode, "--skip-special", ids.special_text, SpecialText::kHide,
             "omit the text of special tokens");
  add_raw(decode, ids.raw);
  add_tokenizer_train(*tokenizer, code);
}

void add_template(CLI::App& app, int& code) {
  CLI::App* group = app.add_subcommand("template", "chat templates");
  group->require_subcommand(1);
  auto [command, options] =
      add_command(*group, code, render_template, "render",
                  "render a chat template and print the text, without an added line break");
  command.add_option("template", options.path, "a Jinja file, or a Hugging Face folder")
      ->required();
  command
      .add_option("--context", options.context,
                  "JSON file of the variables (messages, tools, add_generation_prompt, ...)")
      ->required();
  command.add_option("--now", options.now, "the time of strftime_now(), e.g. 2025-07-10T12:00:00");
  add_raw(command, options.raw);
}

void add_report(CLI::App& app, int& code) {
  auto [command, options] = add_command(
      app, code, report, "report",
      "write an HTML page with curves, completions, warnings and configuration of runs");
  command.add_option("runs", options.runs, "run directories; several are compared")->required();
  command.add_option("--output", options.output,
                     "the page to write; default: report.html in the first run directory");
}

void add_replay(CLI::App& app, int& code) {
  auto [command, options] = add_command(
      app, code, replay, "replay",
      "replay a step of a GRPO run from its journal and check that it is bit-identical; writes "
      "nothing, and starts no program of a reward or an environment");
  command.add_option("run", options.run, "directory of a run (its last GRPO stage) or of a stage")
      ->required();
  command.add_option("--step", options.step, "as in metrics.jsonl")->required();
  CLI::Option* prompt = command.add_option("--prompt", options.prompt,
                                           "print a completion of this prompt of the step, from 0");
  CLI::Option* completion = command.add_option("--completion", options.completion,
                                               "the completion among those of the prompt, from 0");
  prompt->needs(completion);
  completion->needs(prompt);
  command
      .add_option("--token", options.token,
                  "only this token of its sequence, from 0, with the bits of its numbers")
      ->needs(prompt);
  add_raw(command, options.raw);
}

// "; did you mean '--max-tokens'?" for the first unknown option of the sub-command.
std::string option_suggestion(const CLI::App& app) {
  const std::vector<std::string> unknown = app.remaining(true);
  const auto first =
      std::ranges::find_if(unknown, [](const std::string& word) { return word.starts_with("--"); });
  if (first == unknown.end() || app.get_subcommands().empty()) return "";
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_subcommands()[0]->get_options())
    names.push_back(option->get_name());
  return did_you_mean(first->substr(0, first->find('=')), names);
}

// CLI11 takes an argument in brackets as a list; with this character after it, it stays a text.
constexpr char kAfterBracket = '\x01';
void take_brackets_as_text(CLI::App& app) {
  for (CLI::Option* option : app.get_options())
    if (option->get_items_expected_max() > 0)
      option->transform([](std::string text) {
        if (text.ends_with(kAfterBracket)) text.pop_back();
        return text;
      });
  for (CLI::App* command : app.get_subcommands({})) take_brackets_as_text(*command);
}

int run(int argc, const char* const* argv) {
  CLI::App app{"cohort: train transformers, and improve them with GRPO", argv[0]};
  app.require_subcommand(1);
  app.set_version_flag("--version",
                       str("cohort " COHORT_VERSION " (with", kWithCuda ? "" : "out", " CUDA)"),
                       "print the version, and whether it is built with CUDA");
  int code = kOk;
  for (const auto add : {add_train, add_check, add_generate, add_chat, add_logprobs, add_encoders,
                         add_eval, add_sample, add_inspect, add_export, add_report, add_replay,
                         add_tokenizer, add_template, add_gradcheck})
    add(app, code);

  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
  if (argc > 1 && argv[1][0] != '-' && std::ranges::find(names, argv[1]) == names.end()) {
    throw InputError(str("unknown sub-command '", argv[1], "'",
                         did_you_mean(argv[1], names, "; `cohort --help` lists them")));
  }
  take_brackets_as_text(app);
  std::vector<std::string> words(std::reverse_iterator(argv + argc),
                                 std::reverse_iterator(argv + 1));
  for (std::string& word : words)
    if (word.starts_with('[') && word.ends_with(']')) word += kAfterBracket;
  try {
    app.parse(std::move(words));
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) {  // --help, --version
      std::ostringstream text;
      app.exit(e, text);
      print_help(text.str());  // check_output() flushes it and reports errors
      return kOk;
    }
    const std::string command = app.get_subcommands().empty() ? "" : str(argv[1], " ");
    std::string message = e.what();
    std::erase(message, kAfterBracket);
    throw InputError(str(message, option_suggestion(app), "; hint: cohort ", command, "--help"));
  }
  return code;
}

// The message of an exception, in the user's terms also for those of the standard library.
std::string message_of(const std::exception& e) {
  if (dynamic_cast<const std::bad_alloc*>(&e) || dynamic_cast<const std::length_error*>(&e))
    return "out of memory; hint: ask for less at a time, or raise the limit (ulimit -v)";
  const auto* system = dynamic_cast<const std::system_error*>(&e);
  if (system != nullptr && system->code() == std::errc::resource_unavailable_try_again)
    return str("no further thread can be started: ", system->code().message(),
               "; hint: raise the limit (ulimit -u), or lower num_threads");
  return e.what();
}

}  // namespace

int run_command(std::vector<std::string> program, std::span<const std::string> arguments) {
  open_standard_streams();
  set_signals();
  pin_nccl_algorithms();
  own_program() = std::move(program);
  std::vector<const char*> argv{"cohort"};
  for (const std::string& argument : arguments) argv.push_back(argument.c_str());
  try {
    int code = kOk;
    with_full_stack([&] { code = check_output(run(static_cast<int>(argv.size()), argv.data())); });
    return code;
  } catch (const std::exception& e) {
    print_error(message_of(e));
    if (dynamic_cast<const InputError*>(&e) != nullptr) return kBadInput;
    if (dynamic_cast<const HangError*>(&e) != nullptr) return kHung;
    return dynamic_cast<const PeerError*>(&e) != nullptr ? kPeerFailed : kFailed;
  }
}

}  // namespace cohort::apps
