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
#include "distributed/communicator.h"
#include "rl/reward.h"
#include "text/utf8.h"
#include "trainers/config.h"

namespace {

using namespace cohort;
using namespace cohort::apps;

// Without this a file of the run could get the descriptor of a closed standard stream, and receive
// its output.
void open_standard_streams() {
  for (int fd = 0; fd < 3; ++fd)
    if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) < 0) _exit(kFailed);
}

std::string config_footer() {
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

std::string version() {
#ifdef COHORT_WITH_CUDA
  return "cohort " COHORT_VERSION " (with CUDA)";
#else
  return "cohort " COHORT_VERSION " (without CUDA)";
#endif
}

// Flushes standard output, and throws Error if any output was lost.
int check_output(int code) {
  if (code != kOk) return code;
  errno = 0;
  const bool flushed = std::fflush(stdout) == 0;
  if (flushed && std::ferror(stdout) == 0 && std::cout.good()) return code;
  const char* cause = flushed || errno == 0 ? "an earlier write failed" : std::strerror(errno);
  throw Error(str("cannot write to standard output: ", cause,
                  "; hint: check the free space, or the reader of the pipe"));
}

void add_compute_options(CLI::App* command, ComputeOptions& compute) {
  command->add_option("--device", compute.device, "cpu, cuda or cuda:N")->capture_default_str();
  command
      ->add_option_function<std::string>(
          "--dtype",
          [&](const std::string& name) {
            compute.dtype = name == "bf16" ? DType::kBF16 : DType::kF32;
          },
          "f32, or bf16 (CUDA only); default: f32")
      ->check(CLI::IsMember({"f32", "bf16"}));
}

// Runs a sub-command after its arguments are parsed.
using Command = std::function<int()>;

void add_train(CLI::App& app, Command& chosen) {
  const auto options = std::make_shared<TrainOptions>();
  CLI::App* command = app.add_subcommand("train", "train from a YAML file, or resume a run");
  command->add_option("config", options->config, "CONFIG.yaml");
  command->add_option("overrides", options->overrides, "key=value ...");
  command->add_option("--resume", options->resume, "run directory to resume");
  command
      ->add_option("--gpus", options->gpus,
                   "train on the first N GPUs of this machine, one process each")
      ->check(CLI::PositiveNumber);
  command
      ->add_option("--profile", options->profile,
                   "write a trace of N steps, starting at the third, to the run's trace.json: "
                   "kernels, host, phases")
      ->check(CLI::PositiveNumber);
  command->footer(config_footer);
  command->callback([&, options] { chosen = [options] { return train(*options); }; });
}

void add_check(CLI::App& app, Command& chosen) {
  const auto options = std::make_shared<CheckOptions>();
  CLI::App* command = app.add_subcommand(
      "check", "validate a configuration and its data, and print sizes and memory; train nothing");
  command->add_option("config", options->config, "CONFIG.yaml")->required();
  command->add_option("overrides", options->overrides, "key=value ...");
  command
      ->add_option("--gpus", options->gpus, "check for training on N GPUs; this machine needs none")
      ->check(CLI::PositiveNumber);
  command->add_flag_callback(
      "--full", [options] { options->prompts = CheckOptions::Prompts::kFull; },
      "print prompts, answers and solutions of the examples in full");
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
                   "0: greedy; default: 1, or the run's with --template")
      ->check(CLI::Range(0.0, 100.0));
  option("--top-k", sampling.top_k, "0: off")->check(CLI::NonNegativeNumber);
  option("--top-p", sampling.top_p, "1: off")->check(CLI::Range(1e-6, 1.0));
  option("--min-p", sampling.min_p, "fraction of the largest probability; 0: off")
      ->check(CLI::Range(0.0, 1.0));
  option("--repetition-penalty", sampling.repetition_penalty,
         "for tokens of the prompt or the completion; 1: off")
      ->check(CLI::Range(0.01, 100.0));
  option("--presence-penalty", sampling.presence_penalty, "for tokens of the completion; 0: off")
      ->check(CLI::Range(-100.0, 100.0));
  option("--frequency-penalty", sampling.frequency_penalty,
         "for each occurrence in the completion; 0: off")
      ->check(CLI::Range(-100.0, 100.0));
  command->add_option("--logit-bias", sampling.logit_bias, "added to tokens' logits: ID:BIAS");
  command->add_option("--stop", sampling.stop_strings, "texts that end a completion");
  option("--max-tokens", sampling.max_completion_length, "per completion")
      ->check(CLI::PositiveNumber);
  option("--num", options->num, "completions per prompt")->check(CLI::PositiveNumber);
  command
      ->add_option("--best-of", options->best_of,
                   "sample N completions, print the --num with the largest mean token log-prob")
      ->check(CLI::PositiveNumber);
  option("--seed", options->seed, "seed of the random numbers")->check(CLI::NonNegativeNumber);
  add_compute_options(command, options->compute);
  command->add_flag_callback(
      "--json", [options] { options->output = GenerateOptions::Output::kJson; },
      "one JSON line per completion: text, token ids, log-probs, stop reason (eos, stop: "
      "--stop, length: --max-tokens, context)");
  CLI::Option* strings = command->add_flag_callback(
      "--json-input", [options] { options->input = Input::kJson; },
      "each prompt is a JSON string: \"two\\nlines\"");
  command
      ->add_flag_callback(
          "--template", [options] { options->input = Input::kFields; },
          "each prompt is a JSON object with the fields of the data of the model's run, whose "
          "stop tokens, stop strings and temperature are used")
      ->excludes(strings);
  command->callback([&, options] { chosen = [options] { return generate(*options); }; });
}

void add_chat(CLI::App& app, Command& chosen) {
  const auto options = std::make_shared<ChatOptions>();
  CLI::App* command = app.add_subcommand(
      "chat",
      "chat with a model that has a chat template: a line is a message, Ctrl-C stops a reply, /new "
      "starts another conversation, Ctrl-D exits");
  command->add_option("model", options->model, "folder, checkpoint or run directory")->required();
  command->add_option("--system", options->system, "the system message; default: the run's");
  command->add_option("--chat-template-kwargs", options->template_kwargs,
                      "template variables, a JSON object: '{\"enable_thinking\": false}'");
  command
      ->add_option("--temperature", options->temperature,
                   "0: greedy; the defaults of this and the next two options are in the model's "
                   "generation_config.json")
      ->check(CLI::Range(0.0, 100.0));
  command->add_option("--top-k", options->top_k, "0: off")->check(CLI::NonNegativeNumber);
  command->add_option("--top-p", options->top_p, "1: off")->check(CLI::Range(1e-6, 1.0));
  command->add_option("--max-tokens", options->max_tokens, "per reply")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command->add_option("--seed", options->seed, "seed of the random numbers")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  add_compute_options(command, options->compute);
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
  add_compute_options(command, options->compute);
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
                      "write the problems to this file, each with the fraction of correct samples, "
                      "for data.curriculum: pass_rate");
  command->add_flag_callback(
      "--force", [options] { options->test_files = EvalOptions::TestFiles::kWrite; },
      "with --pass-rates: allow the problems of data.jsonl.eval_path");
  command->add_option("--config", options->config,
                      "use data and rewards of this file instead of the run's");
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
      "inspect", "print a model's architecture, parameters, memory, tokenizer and chat template");
  command->add_option("model", options->model, "folder, checkpoint or run directory")->required();
  command
      ->add_option("--context", options->context,
                   "sequence length of the memory estimate; default: 4096, or the model's context")
      ->check(CLI::PositiveNumber);
  add_compute_options(command, options->compute);
  command->callback([&, options] { chosen = [options] { return inspect(*options); }; });
}

void add_tokenizer(CLI::App& app, Command& chosen) {
  CLI::App* command = app.add_subcommand("tokenizer", "encode, decode, or train a tokenizer");
  command->require_subcommand(1);
  const auto options = std::make_shared<TokenizerOptions>();
  const auto add = [&](const char* name, const char* help,
                       int (*execute)(const TokenizerOptions&)) {
    CLI::App* sub = command->add_subcommand(name, help);
    sub->add_option("folder", options->folder, "folder of a model or a tokenizer")->required();
    sub->callback(
        [&chosen, options, execute] { chosen = [options, execute] { return execute(*options); }; });
    return sub;
  };
  add("encode", "convert JSON strings on standard input, one per line, to lists of ids",
      tokenizer_encode)
      ->add_flag_callback(
          "--no-special", [options] { options->special_tokens = SpecialTokens::kNone; },
          "omit the tokens that begin and end a text");
  add("decode", "convert lists of ids on standard input, one per line, to JSON strings",
      tokenizer_decode)
      ->add_flag_callback(
          "--skip-special", [options] { options->special_text = SpecialText::kHide; },
          "omit the text of special tokens");

  const auto training = std::make_shared<TokenizerTrainOptions>();
  CLI::App* train =
      command->add_subcommand("train", "train a byte-level BPE tokenizer on text files");
  train->add_option("files", training->files, "text: files, folders, patterns (UTF-8)")->required();
  train->add_option("--output", training->output, "folder for its files")->required();
  train
      ->add_option("--vocab-size", training->vocab_size,
                   "includes the bytes and the special tokens")
      ->capture_default_str();
  train->add_option("--pattern", training->pattern, "the pattern that splits text into words")
      ->capture_default_str()
      ->check(CLI::IsMember(split_pattern_names()));
  train
      ->add_option("--special", training->special,
                   "a special token; may be repeated; the first one ends a text; default: "
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
      "render", "render a chat template and print the text, without an added line break");
  render->add_option("template", options->path, "a Jinja file, or a Hugging Face folder")
      ->required();
  render
      ->add_option("--context", options->context,
                   "JSON file of the variables (messages, tools, add_generation_prompt, ...)")
      ->required();
  render->add_option("--now", options->now, "the time of strftime_now(), e.g. 2025-07-10T12:00:00");
  render->callback([&, options] { chosen = [options] { return render_template(*options); }; });
}

void add_report(CLI::App& app, Command& chosen) {
  const auto options = std::make_shared<ReportOptions>();
  CLI::App* command = app.add_subcommand(
      "report", "write an HTML page with curves, completions, warnings and configuration of runs");
  command->add_option("runs", options->runs, "run directories; several are compared")->required();
  command->add_option("--output", options->output,
                      "the page to write; default: report.html in the first run directory");
  command->callback([&, options] { chosen = [options] { return report(*options); }; });
}

int run(int argc, char** argv) {
  CLI::App app{"cohort: train transformers, and improve them with GRPO"};
  app.require_subcommand(1);
  app.set_version_flag("--version", version(),
                       "print the version, and whether it is built with CUDA");
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
      std::cout << text.str();  // check_output() flushes it and reports errors
      return kOk;
    }
    throw InputError(str(e.what(), "; hint: cohort ", app.get_subcommands().empty() ? "" : argv[1],
                         app.get_subcommands().empty() ? "" : " ", "--help"));
  }
  return chosen();
}

// Prints the error, without the middle of a long message: it may quote input of any length.
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
