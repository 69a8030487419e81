// The `cohort` command: parses arguments, runs a sub-command, turns errors into exit codes
// (0 done, 1 failed, 2 bad input, 3 another rank failed, 130 interrupted).
#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <functional>
#include <iostream>
#include <memory>
#include <sstream>

#include "apps/commands.h"
#include "apps/signals.h"
#include "core/log.h"
#include "data/example.h"
#include "data/utf8.h"
#include "dist/communicator.h"
#include "rl/reward.h"
#include "trainers/config.h"

namespace {

using namespace cohort;
using namespace cohort::apps;

// Else a file of the run would take the number of a closed standard stream, and be printed into.
void open_standard_streams() {
  for (int fd = 0; fd < 3; ++fd)
    if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) < 0) _exit(kFailed);
}

std::string config_footer() {
  std::string text = "Configuration keys (YAML file, or key=value on the command line):\n";
  text += config_help<TrainConfig>();
  text +=
      "stages:  a list of maps of these keys: one run after the other, each from the weights of "
      "the one before\n\nTasks (data.task):\n";
  for (const Task* task : tasks()) text += str("  ", task->name, ": ", task->what, "\n");
  text += "Rewards (rewards[].name):\n";
  for (const RewardEntry& reward : reward_table())
    text += str("  ", reward.name, ": ", reward.what, "\n");
  return text;
}

std::string version() {
#ifdef COHORT_WITH_CUDA
  return "cohort " COHORT_VERSION " (with CUDA)";
#else
  return "cohort " COHORT_VERSION " (without CUDA)";
#endif
}

// What was printed may still be in a buffer, and what left it may not have arrived.
int check_output(int code) {
  if (code != kOk) return code;
  errno = 0;
  const bool flushed = std::fflush(stdout) == 0;
  if (flushed && std::ferror(stdout) == 0 && std::cout.good()) return code;
  const char* cause = flushed || errno == 0 ? "an earlier write failed" : std::strerror(errno);
  throw Error(str("cannot write to standard output: ", cause,
                  "; hint: is there space, and does the reader still read?"));
}

void add_placement(CLI::App* command, Placement& place) {
  command->add_option("--device", place.device, "cpu, cuda or cuda:N")->capture_default_str();
  command
      ->add_option_function<std::string>(
          "--dtype",
          [&](const std::string& name) {
            place.dtype = name == "bf16" ? DType::kBF16 : DType::kF32;
          },
          "f32, or bf16 (CUDA only); default: f32")
      ->check(CLI::IsMember({"f32", "bf16"}));
}

// What a sub-command does, once its arguments are parsed.
using Command = std::function<int()>;

void add_train(CLI::App& app, Command& chosen) {
  const auto options = std::make_shared<TrainOptions>();
  CLI::App* command = app.add_subcommand("train", "train from a YAML file, or go on with a run");
  command->add_option("config", options->config, "CONFIG.yaml");
  command->add_option("overrides", options->overrides, "key=value ...");
  command->add_option("--resume", options->resume, "run directory to go on with");
  command
      ->add_option("--gpus", options->gpus,
                   "train on the first N GPUs of this machine, one process each")
      ->check(CLI::PositiveNumber);
  command
      ->add_option("--profile", options->profile,
                   "trace so many steps, from the third on, into the run's trace.json: kernels, "
                   "host, phases")
      ->check(CLI::PositiveNumber);
  command->footer(config_footer);
  command->callback([&, options] { chosen = [options] { return train(*options); }; });
}

void add_check(CLI::App& app, Command& chosen) {
  const auto options = std::make_shared<CheckOptions>();
  CLI::App* command = app.add_subcommand(
      "check", "validate a configuration; print what follows from it; train nothing");
  command->add_option("config", options->config, "CONFIG.yaml")->required();
  command->add_option("overrides", options->overrides, "key=value ...");
  command->add_option("--gpus", options->gpus, "for a training on N GPUs; none is needed here")
      ->check(CLI::PositiveNumber);
  command->add_flag_callback(
      "--full", [options] { options->prompts = CheckOptions::Prompts::kFull; },
      "print the prompts, answers and solutions of the examples whole");
  command->footer(config_footer);
  command->callback([&, options] { chosen = [options] { return check(*options); }; });
}

void add_generate(CLI::App& app, Command& chosen) {
  using Input = GenerateOptions::Input;
  const auto options = std::make_shared<GenerateOptions>();
  CLI::App* command = app.add_subcommand("generate", "sample completions");
  command->add_option("model", options->model, "checkpoint or run directory")->required();
  command->add_option("prompts", options->prompts, "prompts; none: one per line of standard input");
  const auto option = [&](const char* name, auto& value, const char* help) {
    return command->add_option(name, value, help)->capture_default_str();
  };
  SamplingConfig& sampling = options->sampling;
  sampling.max_completion_length = 256;
  command
      ->add_option("--temperature", options->temperature,
                   "0: greedy; default: 1, or with --template that of the run")
      ->check(CLI::Range(0.0, 100.0));
  option("--top-k", sampling.top_k, "0: off")->check(CLI::NonNegativeNumber);
  option("--top-p", sampling.top_p, "1: off")->check(CLI::Range(1e-6, 1.0));
  option("--min-p", sampling.min_p, "share of the largest probability; 0: off")
      ->check(CLI::Range(0.0, 1.0));
  option("--repetition-penalty", sampling.repetition_penalty,
         "of tokens that prompt or completion have; 1: off")
      ->check(CLI::Range(0.01, 100.0));
  option("--presence-penalty", sampling.presence_penalty,
         "of tokens that the completion has; 0: off")
      ->check(CLI::Range(-100.0, 100.0));
  option("--frequency-penalty", sampling.frequency_penalty, "the same each time; 0: off")
      ->check(CLI::Range(-100.0, 100.0));
  command->add_option("--logit-bias", sampling.logit_bias, "added to tokens' logits: ID:BIAS");
  command->add_option("--stop", sampling.stop_strings, "texts that end a completion");
  option("--max-tokens", sampling.max_completion_length, "per completion")
      ->check(CLI::PositiveNumber);
  option("--num", options->num, "completions per prompt")->check(CLI::PositiveNumber);
  command
      ->add_option("--best-of", options->best_of,
                   "draw so many, print the --num whose tokens have the largest mean log-prob")
      ->check(CLI::PositiveNumber);
  option("--seed", options->seed, "of the random draws")->check(CLI::NonNegativeNumber);
  add_placement(command, options->place);
  command->add_flag_callback(
      "--json", [options] { options->output = GenerateOptions::Output::kJson; },
      "one JSON line per completion: text, token ids, log-probs, what stopped it (eos, stop: "
      "--stop, length: --max-tokens, context)");
  CLI::Option* strings = command->add_flag_callback(
      "--json-input", [options] { options->input = Input::kJson; },
      "each prompt is a JSON string: \"two\\nlines\"");
  command
      ->add_flag_callback(
          "--template", [options] { options->input = Input::kFields; },
          "each prompt is a JSON object like a line of the data of the model's run, whose stop "
          "tokens, stop strings and temperature are used")
      ->excludes(strings);
  command->callback([&, options] { chosen = [options] { return generate(*options); }; });
}

void add_chat(CLI::App& app, Command& chosen) {
  const auto options = std::make_shared<ChatOptions>();
  CLI::App* command = app.add_subcommand(
      "chat",
      "talk to a model that has a chat template: a line is a message, Ctrl-C stops a reply, /new "
      "begins another conversation, Ctrl-D ends");
  command->add_option("model", options->model, "folder, checkpoint or run directory")->required();
  command->add_option("--system", options->system, "the system message; default: that of the run");
  command->add_option("--chat-template-kwargs", options->template_kwargs,
                      "variables of the template, a JSON object: '{\"enable_thinking\": false}'");
  command
      ->add_option("--temperature", options->temperature,
                   "0: greedy; this and the next two: the model's generation_config.json has the "
                   "defaults")
      ->check(CLI::Range(0.0, 100.0));
  command->add_option("--top-k", options->top_k, "0: off")->check(CLI::NonNegativeNumber);
  command->add_option("--top-p", options->top_p, "1: off")->check(CLI::Range(1e-6, 1.0));
  command->add_option("--max-tokens", options->max_tokens, "per reply")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command->add_option("--seed", options->seed, "of the random draws")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  add_placement(command, options->place);
  command->callback([&, options] { chosen = [options] { return chat(*options); }; });
}

void add_logprobs(CLI::App& app, Command& chosen) {
  const auto options = std::make_shared<LogprobsOptions>();
  CLI::App* command = app.add_subcommand(
      "logprobs", "the log-prob of every token of a text, one JSON line per text");
  command->add_option("model", options->model, "checkpoint or run directory")->required();
  command->add_option("texts", options->texts, "texts; none: one per line of standard input");
  command->add_option("--temperature", options->temperature, "of the distribution")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  add_placement(command, options->place);
  command->add_flag_callback(
      "--eos", [options] { options->end = LogprobsOptions::End::kEos; },
      "end each text with the end-of-sequence token");
  command->callback([&, options] { chosen = [options] { return logprobs(*options); }; });
}

void add_eval(CLI::App& app, Command& chosen) {
  const auto options = std::make_shared<EvalOptions>();
  CLI::App* command = app.add_subcommand(
      "eval", "pass@1 and pass@k on held-out problems, or validation loss on text");
  command->add_option("model", options->model, "checkpoint or run directory")->required();
  command->add_option("overrides", options->overrides,
                      "key=value ... (eval.num_samples=16 eval.k=[1,8])");
  command->add_option("--pass-rates", options->pass_rates,
                      "write the problems to this file, each with the share of its samples that is "
                      "right, for data.curriculum: pass_rate");
  command->add_flag_callback(
      "--force", [options] { options->test_files = EvalOptions::TestFiles::kWrite; },
      "with --pass-rates: also of the problems of data.jsonl.eval_path");
  command->add_option("--config", options->config,
                      "data and rewards from this file instead of the run's own");
  command->footer(config_footer);
  command->callback([&, options] { chosen = [options] { return evaluate(*options); }; });
}

void add_gradcheck(CLI::App& app, Command& chosen) {
  const auto op = std::make_shared<std::string>();
  CLI::App* command =
      app.add_subcommand("gradcheck", "check gradients of the ops against central differences");
  command->add_option("op", *op, "only this op");
  command->callback([&, op] { chosen = [op] { return gradcheck(*op); }; });
}

void add_inspect(CLI::App& app, Command& chosen) {
  const auto options = std::make_shared<InspectOptions>();
  CLI::App* command = app.add_subcommand(
      "inspect", "what a model is: architecture, parameters, memory, tokenizer, chat template");
  command->add_option("model", options->model, "folder, checkpoint or run directory")->required();
  command
      ->add_option("--context", options->context,
                   "tokens of a sequence, for the memory; default: 4096, or the model's context")
      ->check(CLI::PositiveNumber);
  add_placement(command, options->place);
  command->callback([&, options] { chosen = [options] { return inspect(*options); }; });
}

void add_tokenizer(CLI::App& app, Command& chosen) {
  CLI::App* command = app.add_subcommand("tokenizer", "text to token ids and back, or a new one");
  command->require_subcommand(1);
  const auto options = std::make_shared<TokenizerOptions>();
  const auto add = [&](const char* name, const char* help, int (*act)(const TokenizerOptions&)) {
    CLI::App* sub = command->add_subcommand(name, help);
    sub->add_option("folder", options->folder, "folder of a model or a tokenizer")->required();
    sub->callback([&chosen, options, act] { chosen = [options, act] { return act(*options); }; });
    return sub;
  };
  add("encode", "JSON strings of standard input, one a line, to lists of ids", tokenizer_encode)
      ->add_flag_callback(
          "--no-special", [options] { options->added = SpecialTokens::kNone; },
          "without the tokens that begin and end a text");
  add("decode", "lists of ids of standard input, one a line, to JSON strings", tokenizer_decode)
      ->add_flag_callback(
          "--skip-special", [options] { options->shown = SpecialText::kHide; },
          "without the text of special tokens");

  const auto training = std::make_shared<TokenizerTrainOptions>();
  CLI::App* train = command->add_subcommand("train", "a byte-level BPE tokenizer from text files");
  train->add_option("files", training->files, "text: files, folders, patterns (UTF-8)")->required();
  train->add_option("--output", training->output, "folder for its files")->required();
  train->add_option("--vocab-size", training->vocab_size, "with bytes and special tokens")
      ->capture_default_str();
  train->add_option("--pattern", training->pattern, "how text is split into words")
      ->capture_default_str()
      ->check(CLI::IsMember(split_pattern_names()));
  train
      ->add_option("--special", training->special,
                   "a special token; repeat it for more, the first one ends a text; none: "
                   "<|endoftext|>")
      ->allow_extra_args(false);  // the next argument is a file
  train->callback(
      [&chosen, training] { chosen = [training] { return tokenizer_train(*training); }; });
}

void add_template(CLI::App& app, Command& chosen) {
  const auto options = std::make_shared<RenderTemplateOptions>();
  CLI::App* command = app.add_subcommand("template", "chat templates");
  command->require_subcommand(1);
  CLI::App* render = command->add_subcommand(
      "render",
      "print what a chat template makes of its variables: that text, no line break added");
  render->add_option("template", options->path, "a Jinja file, or a Hugging Face folder")
      ->required();
  render
      ->add_option("--context", options->context,
                   "JSON file: the variables (messages, tools, add_generation_prompt, ...)")
      ->required();
  render->add_option("--now", options->now, "the time of strftime_now(), as 2025-07-10T12:00:00");
  render->callback([&, options] { chosen = [options] { return render_template(*options); }; });
}

void add_report(CLI::App& app, Command& chosen) {
  const auto options = std::make_shared<ReportOptions>();
  CLI::App* command = app.add_subcommand(
      "report",
      "write one HTML page with curves, completions, warnings and configuration of runs, to be "
      "opened in a browser");
  command->add_option("runs", options->runs, "run directories; several are compared")->required();
  command->add_option("--output", options->output,
                      "the page to write; default: report.html in the first run directory");
  command->callback([&, options] { chosen = [options] { return report(*options); }; });
}

int run(int argc, char** argv) {
  CLI::App app{"cohort: train transformers, and make them better with GRPO"};
  app.require_subcommand(1);
  app.set_version_flag("--version", version(), "print the version, and whether CUDA is in it");
  Command chosen;
  for (const auto add : {add_train, add_check, add_generate, add_chat, add_logprobs, add_eval,
                         add_inspect, add_report, add_tokenizer, add_template, add_gradcheck})
    add(app, chosen);

  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
  if (argc > 1 && argv[1][0] != '-' &&
      std::find(names.begin(), names.end(), argv[1]) == names.end()) {
    const std::string near = nearest_name(argv[1], names);
    throw InputError(
        str("unknown sub-command '", argv[1], "'",
            near.empty() ? "; `cohort --help` lists them" : "; did you mean '" + near + "'?"));
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) {  // --help, --version
      std::ostringstream text;
      app.exit(e, text);
      std::cout << text.str();  // not flushed before check_output() sees what comes of it
      return kOk;
    }
    throw InputError(str(e.what(), "; hint: cohort ", app.get_subcommands().empty() ? "" : argv[1],
                         app.get_subcommands().empty() ? "" : " ", "--help"));
  }
  return chosen();
}

// A message may quote what was given or read, of any length: its begin and its end are enough.
int fail(const std::exception& e, int code) {
  constexpr size_t kBegin = 4000, kEnd = 2000;
  std::string text = e.what();
  if (text.size() > kBegin + kEnd) {
    const auto boundary = [&](size_t at) { return std::min(next_utf8_boundary(text, at), at + 4); };
    const size_t from = boundary(kBegin), to = boundary(text.size() - kEnd);
    text.replace(from, to - from, str(" [... ", to - from, " bytes ...] "));
  }
  std::cerr << "cohort: " << text << '\n';
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  open_standard_streams();
  set_signals();
  try {
    return check_output(run(argc, argv));
  } catch (const InputError& e) {
    return fail(e, kBadInput);
  } catch (const PeerError& e) {
    return fail(e, kPeerFailed);
  } catch (const std::exception& e) {
    return fail(e, kFailed);
  }
}
