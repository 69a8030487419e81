// `cohort generate`, `logprobs`, `eval` and `sample`: inference with a trained model.
#include <unistd.h>
#include <algorithm>

#include <cmath>
#include <cstdio>
#include <iostream>
#include <map>
#include <numeric>

#include "apps/commands.h"
#include "core/log.h"
#include "data/tasks/tasks.h"
#include "job/checkpoint.h"
#include "job/evaluation.h"
#include "job/model_settings.h"
#include "job/run.h"
#include "job/run_directory.h"
#include "job/several_adapters.h"
#include "sys/files.h"
#include "text/chat_template.h"

namespace cohort::apps {

static void check_dtype(const ComputeOptions& compute) {
  if (compute.dtype == DType::kBF16 && compute.device == "cpu")
    throw InputError("--dtype: bf16 is for CUDA devices; hint: --device cuda, or --dtype f32");
}

LoadedModel load(const std::string& path, const ComputeOptions& compute) {
  check_dtype(compute);
  return load_found(path, [&](const std::string& checkpoint) {
    return load_model(checkpoint, compute.dtype, parse_device(compute.device, "device"),
                      compute.base, 0, compute.weights);
  });
}

std::function<bool(std::string&)> text_source(std::vector<std::string> texts) {
  if (texts.empty() && isatty(STDIN_FILENO) == 1)
    std::cerr << "cohort: reading texts, one per line; Ctrl-D on an empty line ends them\n";
  if (texts.empty()) return read_line;
  return [texts = std::move(texts), next = size_t{0}](std::string& text) mutable {
    if (next == texts.size()) return false;
    text = texts[next++];
    return true;
  };
}

namespace {

void print_line(const std::string& line, bool raw = false) {
  print_now(line + "\n", raw);
}

// Path of the configuration: the given one, else that of the checkpoint's run. Throws InputError
// with `hint` without either.
std::string config_of(const std::string& given, const std::string& checkpoint, const char* hint) {
  if (!given.empty()) return given;
  if (const auto found = find_run_config(checkpoint)) return *found;
  throw InputError(
      str(checkpoint, " belongs to no run, whose config.yaml would be used; hint: ", hint));
}

// Reads the prompts. `run` is used with Input::kFields only.
std::vector<Example> prompts_of(const GenerateOptions& options, const DataConfig& run,
                                const Tokenizer& tokenizer) {
  using Input = GenerateOptions::Input;
  std::vector<Example> prompts;
  const auto next = text_source(options.prompts);
  for (std::string text; next(text);) {
    const std::string where = str("prompt ", prompts.size() + 1);
    if (options.input == Input::kText || options.input == Input::kMessage) {
      prompts.push_back({.prompt = std::move(text)});
      continue;
    }
    const Json value = parse_json(text, where);
    const bool fields = options.input == Input::kFields;
    if (fields ? !value.is_object() : !value.is_string())
      throw InputError(str(where, ": expected ",
                           fields ? "an object like {\"question\": ...}"
                                  : "a JSON string like \"1+1=\"; hint: omit --json-input"));
    prompts.push_back(fields ? prompt_of(run, tokenizer, value, where)
                             : Example{.prompt = value.as_string()});
  }
  return prompts;
}

// Refuses more completions than are kept in memory at a time.
void check_count(const GenerateOptions& options, size_t num_prompts) {
  constexpr int64_t kMax = 10'000'000;
  const int64_t num = std::max(options.num, options.best_of);
  if (num_prompts > 0 && num > kMax / static_cast<int64_t>(num_prompts))
    throw InputError(str(num == options.num ? "--num" : "--best-of", ": expected at most ",
                         kMax / static_cast<int64_t>(num_prompts), " with ", num_prompts,
                         num_prompts == 1 ? " prompt" : " prompts", ", got ", num,
                         "; hint: use several calls with another --seed each"));
}

const char* stop_name(const Trajectory& trajectory) {
  if (trajectory.stop_reason == StopReason::kStopString) return "stop";
  if (!trajectory.truncated()) return "eos";
  return trajectory.stop_reason == StopReason::kLength ? "length" : "context";
}

void print_json(const std::string& prompt, const Trajectory& c, const std::string& adapter,
                bool raw) {
  Json line, sampled_logprobs = Json(Json::Array{});
  for (size_t i = 0; i < c.tokens.size(); ++i)
    if (c.loss_mask[i] != 0) sampled_logprobs.push_back(c.logprobs[i]);
  line.set("prompt", prompt)
      .set("completion", c.text)
      .set("ids", Json::Array(c.tokens.begin(), c.tokens.end()))
      .set("prompt_length", c.prompt_length)
      .set("logprobs", std::move(sampled_logprobs))
      .set("truncated", c.truncated())
      .set("stopped", stop_name(c));
  if (!adapter.empty()) line.set("adapter", adapter);
  print_line(line.dump(), raw);
}

// The adapters of GenerateOptions.
struct NamedAdapters {
  std::vector<std::string> names, folders;

  explicit NamedAdapters(const std::vector<std::string>& options) {
    for (const std::string& option : options) {
      const size_t end = option.find('=');
      if (end == option.npos || end == 0 || end + 1 == option.size())
        throw InputError(str("--adapter: expected NAME=DIR, got '", option, "'"));
      names.push_back(option.substr(0, end));
      folders.push_back(find_checkpoint(option.substr(end + 1)));
      if (!is_adapter_folder(folders.back()))
        throw InputError(str("--adapter: ", folders.back(),
                             " is no adapter: it has no "
                             "adapter_config.json"));
      if (std::ranges::count(names, names.back()) > 1)
        throw InputError(str("--adapter: the name ", names.back(), " is given twice"));
    }
  }
  LoadedModel load(const GenerateOptions& options) const {
    if (folders.empty()) return apps::load(options.model, options.compute);
    check_dtype(options.compute);
    return load_with_adapters(find_checkpoint(options.model), folders, options.compute.dtype,
                              parse_device(options.compute.device, "device"),
                              options.compute.weights);
  }
  // Repeats each prompt for each of them.
  void repeat(std::vector<Example>& prompts, SampleAddress& address) const {
    if (names.empty()) return;
    std::vector<Example> all;
    for (const Example& prompt : prompts)
      for (size_t i = 0; i < names.size(); ++i) {
        all.push_back(prompt);
        address.adapters.push_back(static_cast<int32_t>(i));
      }
    prompts = std::move(all);
    address.repeats = std::ssize(names);
  }
};

// Prints completions in the order of the prompts: one that ends early is queued. As text, the
// tokens of the next one in order are streamed.
class CompletionPrinter {
 public:
  CompletionPrinter(const GenerateOptions& options, const LoadedModel& model,
                    const std::vector<Example>& prompts, std::vector<std::string> adapters)
      : options_(options), model_(model), prompts_(prompts), adapters_(std::move(adapters)) {}

  void print_tokens(const Trajectory& t) {
    if (t.index != next_ || options_.json) return;
    const std::string start = num_printed_ ? "" : begin(t);
    print_now(start + t.text.substr(num_printed_.value_or(0)), options_.raw);
    num_printed_ = t.text.size();
  }

  void print_finished(const Trajectory& finished) {
    finished_[finished.index] = finished;
    for (auto it = finished_.find(next_); it != finished_.end(); it = finished_.find(next_)) {
      const Trajectory& t = it->second;
      if (options_.json) {
        print_json(prompts_[static_cast<size_t>(t.group)].prompt, t, adapter_of(t), options_.raw);
      } else {
        print_tokens(t);
        print_line("", options_.raw);
        if (t.stop_reason == StopReason::kContext)
          std::cerr << "cohort: " << name_of(t) << " ended (context full): the model's context is "
                    << model_.model->config().context << " tokens, prompt included\n";
      }
      if (t.stop_reason == StopReason::kStopToken && trimmed(t.text).empty()) ++num_empty_;
      num_printed_.reset();
      ++next_;
      finished_.erase(it);
    }
  }

  // A notice if no text had the chat template that there is, or if completions are empty, as those
  // of a chat model then often are.
  void print_notice() const {
    const bool misses_template = options_.input < GenerateOptions::Input::kMessage &&
                                 find_chat_template(model_.tokenizer->files());
    if (num_empty_ == 0 && misses_template && options_.input == GenerateOptions::Input::kText)
      print_error(
          "the text was continued as it is, without the model's chat template; hint: --chat makes "
          "it a message");
    if (num_empty_ == 0) return;
    print_error(str(num_empty_, " of ", next_,
                    " completions are empty: the model ended the text at once",
                    misses_template ? "; hint: --chat applies the model's chat template" : ""));
  }

 private:
  std::string adapter_of(const Trajectory& t) const {
    return adapters_.empty() ? "" : adapters_[static_cast<size_t>(t.group) % adapters_.size()];
  }
  std::string name_of(const Trajectory& t) const {
    const auto per_prompt = static_cast<int64_t>(std::max<size_t>(adapters_.size(), 1));
    return str("prompt ", t.group / per_prompt + 1, adapters_.empty() ? "" : ", " + adapter_of(t),
               ", sample ", t.index % options_.num + 1, " of ", options_.num);
  }
  std::string begin(const Trajectory& t) {
    const bool shows_prompt = options_.input != GenerateOptions::Input::kMessage;
    return (options_.num > 1 || !adapters_.empty() ? "--- " + name_of(t) + "\n" : "") +
           (shows_prompt ? prompts_[static_cast<size_t>(t.group)].prompt : "");
  }

  const GenerateOptions& options_;
  const LoadedModel& model_;
  const std::vector<Example>& prompts_;
  const std::vector<std::string> adapters_;  // names; the prompts are repeated for each
  std::map<int64_t, Trajectory> finished_;   // by index
  int64_t next_ = 0, num_empty_ = 0;
  std::optional<size_t> num_printed_;  // bytes of completion next_, once it has begun
};

double mean_logprob(const Trajectory& t) {
  const double sum = std::accumulate(t.logprobs.begin(), t.logprobs.end(), 0.0);
  return sum / static_cast<double>(t.completion_length());
}

// The best `num_kept` of each prompt's `num_sampled` completions, best first and renumbered.
std::vector<Trajectory> best_of(std::vector<Trajectory> all, int64_t num_sampled,
                                int64_t num_kept) {
  std::vector<Trajectory> out;
  for (auto group = all.begin(); group != all.end(); group += num_sampled) {
    std::stable_sort(group, group + num_sampled, [](const Trajectory& a, const Trajectory& b) {
      return mean_logprob(a) > mean_logprob(b);
    });
    for (int64_t i = 0; i < num_kept; ++i) {
      out.push_back(std::move(group[i]));
      out.back().index = out.back().group * num_kept + i;
    }
  }
  return out;
}

// Writes the problems as JSON lines, each with its pass rate. Throws Error if no rate is known.
void write_pass_rates(const std::string& path, const ModelScores& scores) {
  if (std::ranges::all_of(scores.pass_rates, [](double rate) { return std::isnan(rate); }))
    throw Error(str("reward ", scores.measure, ": no value for any problem; --pass-rates: ", path,
                    " is unchanged"));
  std::string lines;
  for (size_t i = 0; i < scores.problems.size(); ++i)
    lines +=
        Json(scores.problems[i].fields).set("pass_rate", scores.pass_rates[i]).dump(Json::kAsRead) +
        "\n";
  replace_file(path, lines);
}

}  // namespace

int generate(const GenerateOptions& options) {
  if (options.best_of > 0 && options.best_of < options.num)
    throw InputError(
        str("--best-of: expected at least --num ", options.num, ", got ", options.best_of));
  const NamedAdapters adapters(options.adapters);
  const LoadedModel loaded = adapters.load(options);
  loaded.model->config().require_decoder();
  std::optional<std::string> config;
  if (options.input == GenerateOptions::Input::kFields)
    config = config_of(options.config, loaded.checkpoint,
                       "name a file with the template: --config CONFIG.yaml, or give the prompts "
                       "as text, without --template");
  auto [data, sampling] =
      options.input == GenerateOptions::Input::kMessage  // see render_messages()
          ? ModelSettings()
          : model_settings(loaded, config, options.sampling.config, options.sampling.given);
  if (config && data.jsonl.path.empty() && data.jsonl.eval_path.empty())
    throw InputError(
        str("--template: ", *config, " has no data.jsonl; hint: give the prompts as text"));
  std::vector<Example> prompts = prompts_of(options, data, *loaded.tokenizer);
  check_count(options, prompts.size() * std::max<size_t>(adapters.names.size(), 1));
  if (options.input == GenerateOptions::Input::kMessage)
    render_messages(options, loaded, prompts, sampling);
  if (config) logging::info("template and sampling of ", *config);
  SampleAddress address{.seed = static_cast<uint64_t>(options.seed)};
  adapters.repeat(prompts, address);
  CompletionPrinter printer(options, loaded, prompts, adapters.names);
  Engine engine(*loaded.model, {});
  const Sampler sampler(engine, *loaded.tokenizer, sampling);
  if (options.best_of > 0) {
    for (const Trajectory& t :
         best_of(sampler.sample(prompts, options.best_of, address), options.best_of, options.num))
      printer.print_finished(t);
    printer.print_notice();
    return kOk;
  }
  sampler.sample(
      prompts, options.num, address,
      {.on_finished = [&](const Example&, const Trajectory& t) { printer.print_finished(t); },
       .on_token =
           [&](const Trajectory& t) {
             printer.print_tokens(t);
             return true;
           }});
  printer.print_notice();
  return kOk;
}

int logprobs(const LogprobsOptions& options) {
  const LoadedModel loaded = load(options.model, options.compute);
  const int64_t context = loaded.model->config().context;
  const auto next = text_source(options.texts);
  for (std::string text; next(text);) {
    std::vector<int32_t> ids = loaded.tokenizer->encode(text, SpecialTokens::kAdd);
    if (options.eos) ids.push_back(loaded.tokenizer->eos_id());
    const auto n = static_cast<int64_t>(ids.size());
    if (n > context + 1)
      throw InputError(
          str("a text of ", n, " tokens is longer than the model's context of ", context));
    // The first token has no log-prob.
    Json values = Json(Json::Array{});
    if (n > 0) values.push_back(Json());
    if (n > 1)
      for (const double lp :
           token_logprobs(*loaded.model, {&ids, 1}, options.temperature)[0].to_vector<double>()) {
        if (!std::isfinite(lp))
          throw NonFiniteError(str("the log-prob of token ", values.as_array().size(), " is ", lp,
                                   ": the weights of ", loaded.checkpoint,
                                   " or what it computes with them are not finite; hint: use an "
                                   "earlier checkpoint, or another --dtype"));
        values.push_back(lp);
      }
    Json line;
    line.set("text", text)
        .set("ids", Json::Array(ids.begin(), ids.end()))
        .set("logprobs", std::move(values));
    print_line(line.dump());
  }
  return kOk;
}

// The model, with the context that the overrides ask for.
static LoadedModel load_evaluated(const std::string& checkpoint, const TrainConfig& config,
                                  const RunOptions& options) {
  const auto asks = [&](const char* key) {
    return std::ranges::any_of(options.overrides,
                               [&](const std::string& text) { return text.starts_with(key); });
  };
  return load_model(
      checkpoint, config.dtype, parse_device(config.device, "device"), options.base,
      asks("model.context=") ? config.model.context : 0,
      asks("precision.base=") ? std::optional(config.model.precision.base) : std::nullopt);
}

int evaluate(const EvalOptions& options) {
  const std::string checkpoint = find_checkpoint(options.model);
  const std::string path =
      config_of(options.config, checkpoint,
                "name a file with the data and the rewards: --rewards CONFIG.yaml");
  RunPlan plan = load_plan(path, options.overrides);
  if (!options.config.empty()) hold_nothing_out_of_few(plan);  // a run's own says what it held out
  const TrainConfig& config = plan.stages.back();
  const bool wants_rates = !options.pass_rates.empty();
  if (wants_rates && !config.data.jsonl.eval_path.empty() && !options.force)
    throw InputError(str("--pass-rates: the problems of data.jsonl.eval_path (",
                         config.data.jsonl.eval_path[0],
                         ") are test data, and a curriculum would train on them; hint: "
                         "data.jsonl.eval_path=[] data.jsonl.path=FILE "
                         "data.held_out_fraction=1 for problems to train on, or --force"));
  if (wants_rates && !has_completions(config.batch.trainer))
    throw InputError("--pass-rates: there are no problems with completions; hint: omit it");
  prepare_programs(plan);
  const LoadedModel loaded = load_evaluated(checkpoint, config, options);
  const ModelScores scores = evaluate_model(plan, loaded);
  if (wants_rates) write_pass_rates(options.pass_rates, scores);
  Json line = Json().set("checkpoint", checkpoint).set("config", path);
  for (const auto& [name, value] : scores.metrics.as_object()) line.set(name, value);
  print_line(line.dump());
  for (const auto& [name, value] : line.as_object())
    if (name.ends_with("/problems") && value.as_int() == 0)
      throw Error(str("eval.sets: ", name, ": 0: no problem was judged"));
  return kOk;
}

int sample(const SampleOptions& options) {
  const std::string checkpoint = find_checkpoint(options.model);
  const std::string path =
      config_of(options.config, checkpoint, "name a file with the rewards: --rewards CONFIG.yaml");
  const RunPlan plan = load_plan(path, options.overrides);
  prepare_programs(plan);
  const LoadedModel loaded = load_evaluated(checkpoint, plan.stages.back(), options);
  const Json counts = sample_problems(plan, loaded, options.request);
  Json line = Json()
                  .set("checkpoint", checkpoint)
                  .set("config", path)
                  .set("output", options.request.output);
  for (const auto& [name, value] : counts.as_object()) line.set(name, value);
  print_line(line.dump());
  return kOk;
}

}  // namespace cohort::apps
