// The `cohort` command: parses arguments, runs a sub-command, turns errors into exit codes
// (0 done, 1 failed, 2 bad input, 3 another rank failed, 130 interrupted).
#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <iostream>
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

int run(int argc, char** argv) {
  CLI::App app{"cohort: train transformers, and make them better with GRPO"};
  app.require_subcommand(1);
  app.set_version_flag("--version", version(), "print the version, and whether CUDA is in it");
  int code = kOk;

  TrainOptions train_options;
  CLI::App* train_command =
      app.add_subcommand("train", "train from a YAML file, or go on with a run");
  train_command->add_option("config", train_options.config, "CONFIG.yaml");
  train_command->add_option("overrides", train_options.overrides, "key=value ...");
  train_command->add_option("--resume", train_options.resume, "run directory to go on with");
  train_command
      ->add_option("--gpus", train_options.gpus,
                   "train on the first N GPUs of this machine, one process each")
      ->check(CLI::PositiveNumber);
  train_command->footer(config_footer);
  train_command->callback([&] { code = train(train_options); });

  CheckOptions check_options;
  CLI::App* check_command = app.add_subcommand(
      "check", "validate a configuration; print what follows from it; train nothing");
  check_command->add_option("config", check_options.config, "CONFIG.yaml")->required();
  check_command->add_option("overrides", check_options.overrides, "key=value ...");
  check_command
      ->add_option("--gpus", check_options.gpus, "for a training on N GPUs; none is needed here")
      ->check(CLI::PositiveNumber);
  check_command->footer(config_footer);
  check_command->callback([&] { code = check(check_options); });

  GenerateOptions generate_options;
  CLI::App* generate_command = app.add_subcommand("generate", "sample completions");
  generate_command->add_option("model", generate_options.model, "checkpoint or run directory")
      ->required();
  generate_command->add_option("prompts", generate_options.prompts,
                               "prompts; none: one per line of standard input");
  generate_command->add_option("--temperature", generate_options.temperature, "0: greedy")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 100.0));
  generate_command->add_option("--top-k", generate_options.top_k, "0: off")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  generate_command->add_option("--top-p", generate_options.top_p, "1: off")
      ->capture_default_str()
      ->check(CLI::Range(1e-6, 1.0));
  generate_command->add_option("--max-tokens", generate_options.max_tokens, "per completion")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  generate_command->add_option("--num", generate_options.num, "completions per prompt")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  generate_command->add_option("--seed", generate_options.seed, "of the random draws")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  add_placement(generate_command, generate_options.place);
  bool generate_json = false, json_input = false, templated = false;
  generate_command->add_flag("--json", generate_json,
                             "one JSON line per completion: text, token ids, log-probs, what "
                             "stopped it (eos, length: --max-tokens, context)");
  CLI::Option* strings = generate_command->add_flag(
      "--json-input", json_input, "each prompt is a JSON string: \"two\\nlines\"");
  generate_command
      ->add_flag("--template", templated,
                 "each prompt is a JSON object that fills data.jsonl.prompt of the model's run")
      ->excludes(strings);
  generate_command->callback([&] {
    if (generate_json) generate_options.output = GenerateOptions::Output::kJson;
    if (json_input) generate_options.input = GenerateOptions::Input::kJson;
    if (templated) generate_options.input = GenerateOptions::Input::kFields;
    code = generate(generate_options);
  });

  LogprobsOptions logprobs_options;
  CLI::App* logprobs_command = app.add_subcommand(
      "logprobs", "the log-prob of every token of a text, one JSON line per text");
  logprobs_command->add_option("model", logprobs_options.model, "checkpoint or run directory")
      ->required();
  logprobs_command->add_option("texts", logprobs_options.texts,
                               "texts; none: one per line of standard input");
  logprobs_command->add_option("--temperature", logprobs_options.temperature, "of the distribution")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  add_placement(logprobs_command, logprobs_options.place);
  bool logprobs_eos = false;
  logprobs_command->add_flag("--eos", logprobs_eos, "end each text with the end-of-sequence token");
  logprobs_command->callback([&] {
    if (logprobs_eos) logprobs_options.end = LogprobsOptions::End::kEos;
    code = logprobs(logprobs_options);
  });

  EvalOptions eval_options;
  CLI::App* eval_command = app.add_subcommand(
      "eval", "pass@1 and pass@k on held-out problems, or validation loss on text");
  eval_command->add_option("model", eval_options.model, "checkpoint or run directory")->required();
  eval_command->add_option("overrides", eval_options.overrides,
                           "key=value ... (eval.num_samples=16 eval.k=[1,8])");
  eval_command->add_option("--config", eval_options.config,
                           "data and rewards from this file instead of the run's own");
  eval_command->footer(config_footer);
  eval_command->callback([&] { code = evaluate(eval_options); });

  std::string op;
  CLI::App* gradcheck_command =
      app.add_subcommand("gradcheck", "check gradients of the ops against central differences");
  gradcheck_command->add_option("op", op, "only this op");
  gradcheck_command->callback([&] { code = gradcheck(op); });

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
  return code;
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
