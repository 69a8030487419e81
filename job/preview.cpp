#include "job/preview.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "core/log.h"
#include "core/progress.h"
#include "data/class_examples.h"
#include "data/parallel_try.h"
#include "job/checkpoint.h"
#include "rl/process_spawner.h"
#include "text/utf8.h"
#include "trainers/evaluate.h"
#include "trainers/sampling.h"

namespace cohort {
namespace {

// Throws InputError for a program that has failed for all of `count` examples, `first` being the
// first error. Returns the failures of another, for a warning.
std::string failures_of(const std::string& program, int64_t failed, int64_t count,
                        const std::string& first, const std::string& printed) {
  if (failed == 0) return "";
  std::string what = str(program, " fails for ", failed, " of ", count, " examples: ", first);
  if (failed < count) return what;
  throw InputError(str(what, "; hint: fix the program, and try it with cohort check; it ",
                       printed.empty() ? "printed no error" : "printed last:", printed));
}

// failures_of() all programs of rewards. `printed`: the last lines of the programs.
std::string check_programs(const TrainConfig& config, const RewardSet::Scores& scores,
                           int64_t count, const std::string& printed) {
  std::string some;
  for (size_t k = 0; k < config.rewards.size(); ++k) {
    const RewardConfig& reward = config.rewards[k];
    const std::string& what = is_served(reward)       ? reward.server.url
                              : reward.name == "code" ? reward.name
                                                      : reward.program.run;
    const std::string failures =
        failures_of(str("rewards[", k, "] '", what, "'"), scores.failed[k].value_or(0), count,
                    scores.first_error[k], printed);
    if (!failures.empty()) some += "; " + failures;
  }
  if (!printed.empty()) logging::info("rewards: the last lines that programs printed:", printed);
  return some;
}

// The solution of an example, or the answer where there is none, as if the model had written it.
Trajectory gold_completion(const Example& example, const Tokenizer& tokenizer,
                           const SamplingConfig& sampling) {
  return as_sampled(example.solution.empty() ? example.answer : example.solution, tokenizer,
                    sampling);
}

// Scores the gold completions of training problems. Programs and functions score only the examples
// of the preview.
void score_solutions(const TrainConfig& config, const Dataset& data, StagePreview& out) {
  const bool runs_programs = std::ranges::any_of(config.rewards, is_program),
             asks = runs_programs || std::ranges::any_of(config.rewards, is_served);
  const int64_t count =
      std::ranges::any_of(config.rewards, is_external) || config.environment.starts
          ? static_cast<int64_t>(out.examples.size())
          : std::min<int64_t>(1000, data.train->size());
  std::optional<ErrorCapture> errors;
  if (runs_programs) errors.emplace(process_spawner());
  const RewardSet rewards(config.rewards, data.task);
  const SamplingConfig sampling = sampling_for(config.sampling, config.data, *data.tokenizer);
  std::vector<Example> problems;
  std::vector<Trajectory> gold;
  for (int64_t i = 0; i < count; ++i) {
    const auto example = static_cast<size_t>(i);
    problems.push_back(example < out.examples.size() ? out.examples[example] : data.train->get(i));
    gold.push_back(gold_completion(problems.back(), *data.tokenizer, sampling));
    gold.back().index = i;
  }
  const RewardSet::Scores scores = rewards.score(problems, gold);
  const std::string failures =
      asks ? check_programs(config, scores, count, errors ? errors->last_lines() : "") : "";
  const auto shown = [](double value) { return std::isnan(value) ? "not applicable" : str(value); };
  int64_t below_maximum = 0, tried = 0;
  for (size_t i = 0; i < problems.size(); ++i) {
    std::string each;
    const bool has_gold = !gold[i].text.empty();
    tried += has_gold;
    bool less = std::isnan(scores.total[i]);
    for (size_t k = 0; k < config.rewards.size(); ++k) {
      const double value = scores.each[k][i], weight = config.rewards[k].weight;
      each += str(k == 0 ? "" : ", ", rewards.names()[k], " ", shown(value));
      if (scores_tokens(config.rewards[k])) continue;  // a right answer may have any value
      less = less || (weight > 0 && value < 1) || (weight < 0 && value > 0);
    }
    each += str("; total ", shown(scores.total[i]));
    if (i < out.examples.size())
      out.gold_rewards.push_back((has_gold ? "" : "no gold answer; an empty completion: ") + each);
    if (has_gold && less && ++below_maximum == 1)
      out.reward_warning = str("; the first: ", excerpt(gold[i].text), " after ",
                               excerpt(problems[i].prompt), " gets ", each);
  }
  if (below_maximum == 0 && !failures.empty()) out.reward_warning = failures.substr(2);
  if (below_maximum > 0)
    out.reward_warning =
        str("rewards: ", below_maximum, " of ", tried,
            " gold answers get less than the rewards can give", out.reward_warning, failures,
            "; hint: the gold answer is the solution, or the answer where there is none; "
            "do the patterns of the rewards fit it?");
}

// Asks an environment that is no built-in one what follows the gold completions of the examples as
// first turns. Throws InputError if it fails for all of them. Begins the dialogues of the examples
// if it starts(), without those that it cannot begin.
void try_environment(const EnvironmentConfig& config, Environment& environment, const Dataset& data,
                     const SamplingConfig& sampling, std::vector<Example>& examples) {
  std::optional<ErrorCapture> errors;
  if (!config.program.run.empty()) errors.emplace(process_spawner());
  std::vector<int32_t> stops = data.tokenizer->stop_ids();
  stops.insert(stops.end(), sampling.stop_tokens.begin(), sampling.stop_tokens.end());
  examples = begin_dialogues({.environment = &environment}, examples, 1, {});
  std::vector<std::string> failed;  // the errors
  for (const Example& example : examples) {
    if (!example.start_error.empty()) {
      failed.push_back(example.start_error);
      continue;
    }
    const Trajectory gold = gold_completion(example, *data.tokenizer, sampling);
    Trajectory turn{.index = &example - examples.data(), .text = gold.text};
    for (const int32_t id : encode_prompt(example, *data.tokenizer)) turn.append_observed(id);
    for (const int32_t id : gold.tokens) turn.append_sampled(id, 0);
    // The stop token, which is no part of the turn's text.
    if (gold.tokens.empty() || std::ranges::find(stops, gold.tokens.back()) == stops.end())
      turn.append_sampled(stops.empty() ? 0 : stops[0], 0);
    turn.transcript.push_back(make_message("assistant", turn_text(*data.tokenizer, turn)));
    environment.submit(example, turn, 0);
  }
  const std::string& run = config.program.run.empty() ? config.server.url : config.program.run;
  for (size_t open = examples.size() - failed.size(); open > 0;)
    for (const EnvironmentReply& reply : environment.poll(true)) {
      --open;
      if (!reply.error.empty()) failed.push_back(reply.error);
    }
  const std::string failures = failures_of(
      str("environment '", run.empty() ? config.name : run, "'"), std::ssize(failed),
      std::ssize(examples), failed.empty() ? "" : failed[0], errors ? errors->last_lines() : "");
  if (!failures.empty()) logging::warn(failures);
  std::erase_if(examples, [](const Example& example) { return !example.start_error.empty(); });
}

// True if training from nothing is clearly meant: supervised, of a model that is described, or on
// generated problems.
bool describes_model(const TrainConfig& config) {
  if (!config.data.task.empty()) return true;
  if (config.batch.trainer == TrainerType::kGrpo) return false;
  const ConfigFields given = config_fields(config.model), defaults = config_fields(ModelConfig{});
  bool described = !config.data.tokenizer_path.empty();
  for (size_t i = 0; i < given.size(); ++i) {
    const std::string& key = given[i].first;
    described = described || (key != "context" && key != "dropout" && key != "recompute" &&
                              given[i].second != defaults[i].second);
  }
  return described;
}

// Sets StagePreview::random_start and is_new_model_meant.
void check_start(const TrainConfig& config, StagePreview& out) {
  if (config.stage > 0 || !config.init_from.empty() || reads_text(config.batch.trainer)) return;
  out.is_new_model_meant = describes_model(config);
  out.random_start = str("model: ", trainer_name(config.batch.trainer),
                         " starts from random weights, as no model is given");
  if (!out.is_new_model_meant)
    out.random_start +=
        str("; hint: model.path=DIR, or ", config.batch.trainer == TrainerType::kGrpo
                                               ? "a stage of sft before it"
                                               : "sizes such as model.num_layers of a new one");
}

// Sets StagePreview::stop_warning. A stop token or string counts anywhere among the targets:
// templates may put a line end after it. All examples but rendered conversations end with the end
// of sequence.
void check_stops(const TrainConfig& config, const Dataset& data, StagePreview& out) {
  constexpr int64_t kExamined = 100, kAnyLength = 1 << 30;
  if (config.batch.trainer != TrainerType::kSft || data.chat == nullptr) return;
  const SamplingConfig sampling = sampling_for(config.sampling, config.data, *data.tokenizer);
  std::set<int64_t> stops(sampling.stop_tokens.begin(), sampling.stop_tokens.end());
  for (const int32_t id : data.tokenizer->stop_ids()) stops.insert(id);
  const int64_t count = std::min(kExamined, data.train->size());
  int64_t endless = 0;
  for (int64_t i = 0; i < count; ++i) {
    const TokenSequence s = supervised_sequence(data.train->get(i), *data.tokenizer, kAnyLength);
    std::vector<int32_t> targets;
    for (size_t k = 0; k < s.tokens.size(); ++k)
      if (s.loss_mask[k] != 0) targets.push_back(s.tokens[k]);
    const std::string text = data.tokenizer->decode(targets, SpecialText::kShow);
    const auto ends_it = [&](const std::string& stop) { return text.find(stop) != text.npos; };
    endless += std::ranges::none_of(targets, [&](int32_t id) { return stops.contains(id); }) &&
               std::ranges::none_of(sampling.stop_strings, ends_it);
  }
  if (2 * endless > count)
    out.stop_warning =
        str("data: ", endless, " of the first ", count,
            " examples have no stop token that is learned, so the model does not learn to end its "
            "answers; hint: a chat template that ends the assistant's turns with a special token, "
            "inside its {% generation %} blocks if it has them, or that token in stop_tokens");
}

// A text in a tool's schema or in a call, which may be around a `function`; "": none.
std::string function_text(const Json& tool, const char* key) {
  const Json* function = tool.find("function");
  const std::string* text = (function == nullptr ? tool : *function).find_text(key);
  return text == nullptr ? "" : *text;
}

// Sets StagePreview::template_warning, and notes an environment of tools that no prompt shows.
void check_template(const TrainConfig& config, const Dataset& data, StagePreview& out) {
  constexpr int64_t kExamined = 100;
  if (data.chat == nullptr) return;
  bool has_tools = false;
  const auto warn = [&](const std::string& where, const char* lost) {
    out.template_warning =
        str(where, ": the chat template shows nothing of ", lost, ", which the model does not ",
            "see or learn; hint: a chat_template.jinja in the model's folder that renders it");
  };
  for (int64_t i = 0; i < std::min(kExamined, data.train->size()); ++i) {
    const Example example = data.train->get(i);
    const std::string text = example.prompt + example.solution;
    const auto shows = [&](const Json& list) {
      return !list.is_array() || std::ranges::all_of(list.as_array(), [&](const Json& tool) {
        return text.find(function_text(tool, "name")) != text.npos;
      });
    };
    const Json& own = example.template_variables.get_or_null("tools");
    for (const Json* tools : {&config.data.tools, &own}) {
      has_tools |= !tools->is_null();
      if (!shows(*tools))
        return warn(tools == &own ? example.where : "environment", "the schemas of the tools");
    }
    const Json::Array& messages = example.conversation.as_array();
    for (size_t m = 0; m < messages.size(); ++m) {
      const Json& calls = messages[m].get_or_null("tool_calls");
      if (!shows(calls)) return warn(str(example.where, ": message ", m + 1), "its tool_calls");
      for (const Json& call : calls.is_array() ? calls.as_array() : Json::Array{})
        if (const Json arguments = function_text(call, "arguments");
            arguments.as_string().starts_with('{') && text.find(arguments.dump()) != text.npos)
          out.template_warning = example.where +
                                 ": the chat template quotes the arguments of tool_calls, a text; "
                                 "hint: an object in place of the JSON text";
    }
  }
  if (config.environment.is_set() && !has_tools)
    out.lengths.notes.emplace_back(
        "environment: without tool_schemas no prompt shows tools; hint: if it has some, `python3 "
        "cohort_environment.py tools.py --schemas > tools.json` and tool_schemas: tools.json");
}

StagePreview preview_stage(const TrainConfig& config, ModelDescription& start,
                           std::span<const TrainConfig> earlier) {
  Dataset data = load_dataset(config, std::move(start.tokenizer));
  if (start.config.vocab_size == 0) {  // a new model
    start.config.vocab_size = data.tokenizer->vocab_size();
    start.config.resolve();
  }
  start.config.check_device(device_named(config.device, "device"), config.dtype);
  check_precision(start.config, config.dtype);
  const ContextLimit limit = context_limit(config, start.config);
  bool scores = config.batch.trainer == TrainerType::kGrpo;
  std::unique_ptr<Environment> environment;
  if (has_completions(config.batch.trainer)) {
    const Correctness correct =
        correctness_of(config.eval.correct, config.rewards, data.task,
                       data.held_out_set->size() > 0 || !config.eval.sets.empty());
    load_eval_sets({config.eval, config, config.rewards, correct}, data, start.config.context,
                   limit);
    scores |= correct.command != nullptr;
    environment = environment_of(config.environment, config.data, *data.tokenizer);
  }
  if (scores) RewardSet(config.rewards, data.task);
  StagePreview out{.model = start.config,
                   .lengths = check_data(config, data, start.config.context, limit)};
  if (config.batch.trainer == TrainerType::kGrpo && config.grpo.beta > 0 &&
      config.grpo.reference_type() == ReferenceType::kFolder)
    out.teacher = check_teacher(config, start.config, *data.tokenizer);
  if (config.batch.trainer == TrainerType::kGrpo && !config.grpo.reference_prompt.empty()) {
    const auto prompt = reference_prompt(config, data, start.config.context,
                                         out.teacher ? out.teacher->context : start.config.context);
    begin_activity("checking the prompts of the reference");
    parallel_try(std::min<int64_t>(data.train->size(), data.task != nullptr ? 1000 : INT64_MAX), 64,
                 [&](int64_t i) { prompt(data.train->get(i)); });
  }
  check_start(config, out);
  check_stops(config, data, out);
  check_template(config, data, out);
  out.rate_warning = rate_warning(config, start.config);
  check_sampling(config.sampling, config.batch.trainer, *data.tokenizer,
                 out.lengths.shortest_prompt, start.config.context, limit);
  const bool is_text = reads_text(config.batch.trainer);
  out.held_out_size = is_text ? 0 : data.held_out_set->size();
  out.held_out = is_text ? data.held_out_text.size() : static_cast<int64_t>(data.held_out.size());
  if (!is_text)
    for (int64_t i = 0; i < std::min<int64_t>(3, data.train->size()); ++i)
      out.examples.push_back(data.train->get(i));
  if (environment != nullptr && config.environment.name != "tools")
    try_environment(config.environment, *environment, data,
                    sampling_for(config.sampling, config.data, *data.tokenizer), out.examples);
  if (scores) score_solutions(config, data, out);
  out.leak = held_out_leak(data, {earlier.begin(), earlier.end()});
  start.tokenizer = make_tokenizer(data.tokenizer->files(), "the stage before");
  return out;
}

}  // namespace

std::vector<std::string> TrainConfig::warnings() const {
  std::vector<std::string> out = unread;
  if (eval.stop_at > 0 && reads_text(batch.trainer))
    out.push_back("eval.stop_at: is for scores, which text has none of; hint: leave it out");
  if (optimizer.warmup_steps > batch.steps)
    out.push_back(str("warmup_steps: ", optimizer.warmup_steps, " of ", batch.steps,
                      " steps: the learning rate never reaches its peak; hint: warmup_steps=",
                      (3 * batch.steps + 99) / 100));
  if (const LoraConfig& lora = model.lora;
      lora.rank == 0 && (lora.alpha != LoraConfig().alpha || lora.rslora || !lora.targets.empty()))
    out.push_back(
        "lora.rank: 0 means no adapters, so that the other keys of lora do nothing; hint: "
        "lora.rank=16");
  const OptimizerStorage& storage = optimizer.storage;
  if (storage.place == StatePlace::kHost && device == "cpu")
    out.push_back("optimizer.place: host does nothing but copies with device: cpu");
  for (const RewardConfig& reward : rewards) {
    const ProgramConfig& program = reward.program;
    const double seconds = is_served(reward)
                               ? program.timeout.value_or(60)
                               : std::max(program.timeout.value_or(0), program.start_timeout);
    if (is_external(reward) && watchdog_minutes > 0 && seconds / 60 >= watchdog_minutes)
      out.push_back(
          str("watchdog_minutes: ", watchdog_minutes, " is not longer than the ", seconds / 60,
              " minutes that '",
              is_served(reward)     ? reward.server.url
              : program.run.empty() ? reward.name
                                    : program.run,
              "' may take for an answer, which would end the run; hint: watchdog_minutes=",
              std::ceil(seconds / 60) + 10));
  }
  if (batch.trainer == TrainerType::kDpo) {
    const std::vector<std::string> lines = preference.warnings();
    out.insert(out.end(), lines.begin(), lines.end());
    if (model.dropout > 0)
      out.push_back(
          "model.dropout: does nothing in dpo, whose policy is compared with a reference without "
          "dropout; hint: leave it out");
  }
  if (batch.trainer != TrainerType::kGrpo) return out;
  if (const std::string missing = missing_function(); !missing.empty()) out.push_back(missing);
  if (sampling.restricts() && grpo.importance_weights == kernels::Importance::kNone &&
      grpo.rejection.empty())
    out.push_back(
        "top_k, top_p, min_p, penalties and logit_bias change sampling only: the update treats "
        "samples as if they came from the policy itself; truncated_mass in metrics.jsonl is the "
        "mass that top_k, top_p and min_p leave out; hint: importance_weights=truncate");
  for (const auto& lines : {grpo.warnings(sampling.restricts(), has_rewards()), grpo.advice()})
    out.insert(out.end(), lines.begin(), lines.end());
  if (grpo.ref_sync_every > batch.steps)
    out.push_back(str("ref_sync_every: ", grpo.ref_sync_every, " of ", batch.steps,
                      " steps: the reference never moves; hint: a smaller ref_sync_every"));
  return out;
}

ModelConfig model_with_head(const TrainConfig& config) {
  ModelConfig out = config.model;
  if (!trains_encoder(config.batch.trainer)) return out;
  const bool classes = config.batch.trainer == TrainerType::kClassify;
  out.head = classes ? HeadType::kClasses : HeadType::kMaskedToken;
  if (classes) out.labels = class_labels(config);
  return out;
}

ContextLimit context_limit(const TrainConfig& config, const ModelConfig& model) {
  return config.init_from.empty() ? ContextLimit::kMayGrow : model.context_limit();
}

std::function<std::vector<int32_t>(const Example&)> reference_prompt(const TrainConfig& config,
                                                                     const Dataset& data,
                                                                     int64_t context,
                                                                     int64_t reference_context) {
  return [&config, &data, context, reference_context,
          text = FieldTemplate("reference_prompt", config.grpo.reference_prompt)](
             const Example& example) {
    std::vector<int32_t> tokens = prompt_with(text, example, data);
    const int64_t own = std::ssize(encode_prompt(example, *data.tokenizer)),
                  completion = std::min(config.sampling.max_completion_length, context - own);
    if (tokens.empty() || std::ssize(tokens) + completion > reference_context)
      throw InputError(
          str("reference_prompt: ",
              example.where.empty() ? "the prompt " + excerpt(example.prompt) : example.where,
              " becomes ", tokens.size(), " tokens, which with a completion of ", completion,
              " exceed the reference's context, ", reference_context,
              ", or are none; hint: a shorter template or max_completion_length"));
    return tokens;
  };
}

ModelConfig check_teacher(const TrainConfig& config, const ModelConfig& student,
                          const Tokenizer& tokenizer) {
  const std::string& folder = config.grpo.reference;
  const auto require = [&](bool ok, const std::string& reason) {
    if (!ok) throw InputError(str("reference: ", folder, reason));
  };
  require(path_exists(folder),
          " is no folder here, and none of base, start and policy; hint: check "
          "the path");
  const ModelDescription teacher =
      load_found(folder, [](const std::string& from) { return describe_model(from); });
  require(!teacher.config.is_encoder(), " is an encoder, which has no next token");
  require(teacher.config.context >= student.context,
          str(" has a context of ", teacher.config.context, " tokens, and the policy's is ",
              student.context, "; hint: model.context=", teacher.config.context));
  const auto shown = [](const Tokenizer& of, int32_t id) {
    return of.decode(std::span(&id, 1), SpecialText::kShow);
  };
  const int64_t count = tokenizer.vocab_size();
  require(
      teacher.tokenizer->vocab_size() >= count && teacher.config.vocab_size >= student.vocab_size,
      str(" has a head of ", teacher.config.vocab_size, " tokens, ",
          teacher.tokenizer->vocab_size(), " of them in its tokenizer, and the policy ",
          student.vocab_size, " and ", count, "; hint: a teacher with the policy's tokenizer"));
  for (int32_t id = 0; id < count; ++id)
    require(shown(tokenizer, id) == shown(*teacher.tokenizer, id) &&
                tokenizer.token_text(id).bytes == teacher.tokenizer->token_text(id).bytes,
            str(" has another tokenizer: token ", id, " is ",
                excerpt(shown(*teacher.tokenizer, id)), ", and the policy's is ",
                excerpt(shown(tokenizer, id)), "; hint: a teacher with the policy's tokenizer"));
  return teacher.config;
}

std::string rate_warning(const TrainConfig& config, const ModelConfig& model) {
  constexpr int64_t kLarge = 50'000'000;
  constexpr double kMostTimes = 10.001;  // ten times is no warning, however it rounds
  const double rate = config.optimizer.learning_rate,
               usual = default_config(config.batch.trainer, config.batch.steps,
                                      config.model.lora.rank > 0)
                           .optimizer.learning_rate;
  const bool is_new = config.init_from.empty() && config.stage == 0;
  if (is_new || rate <= kMostTimes * usual || model_size(model).parameters < kLarge) return "";
  return str("learning_rate: ", rate, " is ", std::round(rate / usual),
             " times the default, which may ruin a trained model; hint: learning_rate=", usual);
}

void check_adapters_have_model(const RunPlan& plan) {
  const TrainConfig& first = plan.stages[0];
  if (first.model.lora.rank > 0 && first.init_from.empty())
    throw InputError("lora.rank: adapters need a trained model; hint: model.path=DIR");
}

std::vector<StagePreview> preview_plan(const RunPlan& plan) {
  if (!plan.missing.empty()) throw InputError(plan.missing[0]);
  // The model and tokenizer a stage starts from; without a tokenizer both are derived from it.
  const TrainConfig& first = plan.stages[0];
  ModelDescription start{.config = model_with_head(first), .tokenizer = nullptr};
  if (!first.init_from.empty())
    start = load_found(first.init_from, [&](const std::string& from) {
      return describe_model(from, model_with_head(first), first.data);
    });
  std::vector<StagePreview> out;
  for (const TrainConfig& config : plan.stages) {
    if (!out.empty()) {
      check_compatible(config.model, config.data, start.config, *start.tokenizer,
                       "the stage before");
      apply_run_options(config.model, start.config);
      apply_head(model_with_head(config), start.config, "the stage before");
      apply_adapters(config.model.lora, start.config, start.config.lora.rank > 0,
                     "the stage before");
    }
    out.push_back(preview_stage(config, start, std::span(plan.stages).first(out.size())));
  }
  return out;
}

void hold_nothing_out_of_few(RunPlan& plan) {
  std::vector<JsonlConfig*> few;
  for (TrainConfig& stage : plan.stages) {
    JsonlConfig& jsonl = stage.data.jsonl;
    if (jsonl.path.empty() || !jsonl.eval_path.empty()) continue;
    if (jsonl.held_out_fraction == 0 || jsonl.held_out_fraction == 1) continue;
    if (jsonl.held_out_fraction) return;  // one split for all stages
    if (stage.eval.every > 0 || stage.eval.stop_at > 0 || !has_fewer_problems(jsonl, 50)) return;
    few.push_back(&jsonl);
  }
  for (JsonlConfig* jsonl : few) jsonl->held_out_fraction = 0;
}

}  // namespace cohort
