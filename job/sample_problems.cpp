#include "job/sample_problems.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <numeric>
#include <set>

#include "core/log.h"
#include "data/tasks/tasks.h"
#include "job/journal.h"
#include "job/resumable_file.h"
#include "rl/advantage.h"
#include "rl/group.h"
#include "trainers/evaluate.h"
#include "trainers/sampling.h"

namespace cohort {
namespace {

// Address of the random numbers and of dialogues, as of an evaluation before the first step.
constexpr int64_t kAddressStep = -1;
constexpr const char* kSum = "sum";
constexpr const char* kChoices[] = {"all", "--best", "--pairs"};  // by SampleChoice

using Condition = std::function<bool(const ScoredCompletion&)>;

std::vector<Condition> parse_conditions(const std::vector<std::string>& keep,
                                        const std::vector<std::string>& names) {
  constexpr std::string_view kSigns = "<>=";
  std::vector<Condition> out;
  const std::string all = join(keep, ",");
  for (size_t from = 0, to = 0; !keep.empty() && from <= all.size(); from = to + 1) {
    to = std::min(all.find(',', from), all.size());
    const std::string_view text = std::string_view(all).substr(from, to - from);
    const size_t begin = std::min(text.find_first_of(kSigns), text.size()),
                 end = std::min(text.find_first_not_of(kSigns, begin), text.size());
    const std::string name(trimmed(text.substr(0, begin))), op(text.substr(begin, end - begin));
    const std::string_view number = trimmed(text.substr(end));
    double limit = NAN;
    if (std::from_chars(number.data(), number.data() + number.size(), limit).ptr !=
            number.data() + number.size() ||
        !std::isfinite(limit) || !has_word(">= <= > < ==", op))
      throw InputError(str("--keep: '", text, "': expected NAME OP NUMBER, such as \"", names[0],
                           " >= 1\"; OP is one of >=, <=, >, < and =="));
    const auto found = std::ranges::find(names, name);
    if (found == names.end() && name != kSum)
      throw InputError(str("--keep: no reward is called '", name, "'; the rewards are ",
                           join(names, ", "), ", and ", kSum, " is their weighted sum",
                           did_you_mean(name, names)));
    const auto position = static_cast<size_t>(found - names.begin());
    out.push_back([op, limit, position](const ScoredCompletion& c) {
      const double value = position < c.rewards.size() ? c.rewards[position] : c.reward;
      return (value == limit && op.ends_with('=')) || (value < limit && op[0] == '<') ||
             (value > limit && op[0] == '>');
    });
  }
  return out;
}

// The text after the prompt, or in a conversation its messages.
Json completion_of(const Group& group, const Trajectory& t) {
  if (group.example.conversation.is_null()) return t.text;
  return t.transcript.is_null() ? Json(Json::Array{make_message("assistant", t.text)})
                                : t.transcript;
}

// Makes the lines of problems, and counts.
class LineMaker {
 public:
  LineMaker(const SampleRequest& request, const TrainConfig& config, const Tokenizer& tokenizer,
            int64_t context, const std::vector<std::string>& names)
      : request_(request),
        data_(config.data),
        tokenizer_(tokenizer),
        context_(context),
        names_(names),
        conditions_(parse_conditions(request.keep, names)) {
    if (data_.is_chat()) teacher_.emplace(data_, tokenizer, ChatRenderer::Purpose::kTeach);
    for (const char* name :
         {"problems", "completions", "kept", "solved", "failed", "truncated", "other_tokens"})
      counts_.set(name, 0);
  }

  // Counts a problem and returns its lines.
  std::string lines_of(const Group& group) {
    const auto reward = [](const ScoredCompletion* c) { return c->reward; };
    const bool pairs = request_.choice == SampleChoice::kPairs;
    add("problems", 1);
    std::vector<const ScoredCompletion*> scored = scored_of(group), kept;
    std::set<std::string> texts;
    for (const ScoredCompletion* c : scored)
      if (std::ranges::all_of(conditions_, [&](const Condition& holds) { return holds(*c); }) &&
          (texts.insert(completion_of(group, *c).dump()).second || !request_.distinct))
        kept.push_back(c);
    if (kept.empty()) return "";
    add("solved", 1);
    if (request_.choice != SampleChoice::kAll) kept = {*std::ranges::max_element(kept, {}, reward)};
    if (request_.most > 0 && std::ssize(kept) > request_.most)
      kept.resize(static_cast<size_t>(request_.most));
    const ScoredCompletion& worst = **std::ranges::min_element(scored, {}, reward);
    const Json rejected = completion_of(group, worst);
    if (pairs && (equal_rewards(kept[0]->reward, worst.reward) ||
                  rejected.dump() == completion_of(group, *kept[0]).dump()))
      return "";
    std::string out;
    for (const ScoredCompletion* c : kept) {
      Json line = line_of(group, *c, pairs ? "chosen" : "completion");
      line.set(pairs ? "chosen_rewards" : "rewards", rewards_of(*c));
      if (pairs) line.set("rejected", rejected).set("rejected_rewards", rewards_of(worst));
      out += line.dump() + "\n";
      add("kept", 1);
      add("other_tokens", teaches(group, *c) ? 0 : 1);
    }
    return out;
  }

  // The numbers that sample_problems() returns.
  const Json& counts() const { return counts_; }
  int64_t count(const char* name) const { return counts_.at(name).as_int(); }
  void restore(const Json& counts) { counts_ = counts; }
  // The error of the first failed completion; empty: there is none.
  const std::string& first_error() const { return first_error_; }

 private:
  void add(const char* name, int64_t number) { counts_.set(name, count(name) + number); }

  // The completions that may be kept, or be the worst: whole ones with a score. Counts the others.
  std::vector<const ScoredCompletion*> scored_of(const Group& group) {
    std::vector<const ScoredCompletion*> out;
    for (const ScoredCompletion& c : group.completions) {
      std::string error = c.error;
      if (error.empty() && !c.truncated() && !std::isnan(c.reward)) try {
          teaches(group, c);
          out.push_back(&c);
        } catch (const InputError& e) {
          error = str("its text cannot be taught: ", e.what());
        }
      add("completions", 1);
      add("failed", error.empty() ? 0 : 1);
      add("truncated", error.empty() && c.truncated() ? 1 : 0);
      if (first_error_.empty()) first_error_ = error;
    }
    return out;
  }

  Json rewards_of(const ScoredCompletion& c) const {
    Json out;
    for (size_t i = 0; i < names_.size(); ++i) out.set(names_[i], c.rewards[i]);
    return out.set(kSum, c.reward);
  }

  // The prompt with what its template needs, and the completion as the field `name`.
  Json line_of(const Group& group, const ScoredCompletion& c, const char* name) const {
    const Example& example = group.example;
    const Json completion = completion_of(group, c);
    if (!teacher_) return Json().set("prompt", example.prompt).set(name, completion);
    Json line = Json().set("prompt", example.conversation).set(name, completion), others;
    Json variables = parse_template_kwargs(data_.chat_template_kwargs, "data.chat_template_kwargs");
    if (!data_.tools.is_null()) variables.set("tools", data_.tools);
    if (!example.template_variables.is_null())
      for (const auto& [key, value] : example.template_variables.as_object())
        variables.set(key, value);
    if (!variables.is_null())
      for (const auto& [key, value] : variables.as_object())
        (key == "tools" ? line : others).set(key, value);
    return others.is_null() ? line : line.set("chat_template_kwargs", others);
  }

  // True if training on the line of a completion teaches all tokens that were sampled, after those
  // that they followed. Throws InputError if the line cannot be read.
  bool teaches(const Group& group, const ScoredCompletion& c) const {
    const Json line = parse_json(line_of(group, c, "completion").dump(), "its line");
    const Json &prompt = line.at("prompt"), &completion = line.at("completion");
    Example example{.fields = line};
    if (teacher_) {
      Json::Array messages = prompt.as_array();
      example.completion_begin = messages.size();
      for (const Json& message : completion.as_array()) messages.push_back(message);
      example.messages = std::move(messages);
      teacher_->render(example);
    } else {
      example.prompt = prompt.as_string();
      example.solution = completion.as_string();
    }
    const TokenSequence taught =
        supervised_sequence(example, tokenizer_, context_, TooLong::kTruncate);
    if (taught.tokens.size() < c.tokens.size()) return false;
    for (size_t i = 0; i < c.tokens.size(); ++i)
      if (taught.tokens[i] != c.tokens[i] || taught.loss_mask[i] < c.loss_mask[i]) return false;
    return true;
  }

  const SampleRequest& request_;
  const DataConfig& data_;
  const Tokenizer& tokenizer_;
  const int64_t context_;
  const std::vector<std::string>& names_;
  const std::vector<Condition> conditions_;
  std::optional<ChatRenderer> teacher_;  // none: problems are texts
  Json counts_;
  std::string first_error_;
};

// All that the bytes of the output depend on.
ConfigFields settings_of(const TrainConfig& config, const LoadedModel& loaded,
                         const SamplingConfig& sampling, const EvalSet& set,
                         const SampleRequest& request) {
  // The weights are those of adapters alone where there are any.
  uint64_t model = checksum(str(loaded.model->config().context), weights_hash(*loaded.model));
  if (!loaded.base.path.empty()) model = checksum(base_fingerprint(loaded.base.path), model);
  for (const char* name : {"/config.json", "/adapter_config.json", "/precision.json"})
    if (const std::string path = loaded.checkpoint + name; path_exists(path))
      model = checksum(read_text_file(path), checksum(name, model));
  for (const auto& [name, content] : loaded.tokenizer->files())
    model = checksum(content, checksum(name, model));
  uint64_t problems = checksum(set.fingerprint);
  for (const Example& e : set.problems) problems = checksum(e.answer, checksum(e.prompt, problems));
  ConfigFields out = {{"model", hex(model)},
                      {"problems", hex(problems)},
                      {"seed", str(config.seed)},
                      {"dtype", dtype_name(config.dtype)},
                      {"device", config.device.substr(0, config.device.find(':'))},
                      {"--num", str(request.num)},
                      {"--keep", join(request.keep, ",")},
                      {"--most", str(request.most)},
                      {"--distinct", str(request.distinct)},
                      {"choice", kChoices[static_cast<int>(request.choice)]},
                      {"data.chat_template_kwargs", config.data.chat_template_kwargs}};
  const auto add = [&](const std::string& prefix, const ConfigFields& fields) {
    for (const auto& [key, value] : fields) out.emplace_back(prefix + key, value);
  };
  add("", config_fields(sampling));
  for (size_t i = 0; i < config.rewards.size(); ++i)
    add(str("rewards.", i, "."), config_fields(config.rewards[i]));
  add("environment.", config_fields(config.environment));
  return out;
}

void check_request(const TrainConfig& config, const SampleRequest& request) {
  const JsonlConfig& jsonl = config.data.jsonl;
  if (config.rewards.empty())
    throw InputError(
        "rewards: there are none to score completions by; hint: --rewards CONFIG.yaml, such as the "
        "file of a grpo run");
  if (jsonl.messages.empty() && jsonl.prompt.empty())
    throw InputError("data.jsonl.prompt: it is empty; hint: data.jsonl.prompt='{prompt}'");
  if (config.environment.is_set() && !config.data.is_chat())
    throw InputError(
        "environment: lines of texts cannot have observations; hint: data.chat=true, which makes "
        "problems conversations");
  if (config.sampling.temperature == 0 && request.num > 1)
    throw InputError(
        "temperature: 0 makes all completions of a problem equal; hint: temperature=1, or --num 1");
}

// The completions of problems, of which the first has the index `begin`, with their scores.
std::vector<Group> sample_and_score(const Sampler& sampler, const RewardSet& rewards,
                                    std::span<const Example> problems, SampleAddress address,
                                    int64_t begin, int64_t num) {
  address.prompt_indices.resize(problems.size());
  std::iota(address.prompt_indices.begin(), address.prompt_indices.end(), begin);
  const std::vector<Example> prompts = sampler.begin(problems, num, address);
  const auto submit = [&](const Example& e, const Trajectory& t) { rewards.submit(e, t, 0); };
  std::vector<Trajectory> completions =
      sampler.sample(prompts, num, address, {.on_finished = submit});
  const RewardSet::Scores scores = rewards.score(prompts, completions);
  return group_completions(prompts, std::move(completions), scores);
}

// Throws Error if all completions of some problems have failed, or all so far.
void check_failures(std::span<const Group> groups, bool any_before, const std::string& output) {
  for (const Group& group : groups)
    for (const ScoredCompletion& c : group.completions)
      if (c.error.empty() || (groups.size() == 1 && any_before)) return;
  throw Error(str("none of the completions of problems ", groups.front().index + 1, " to ",
                  groups.back().index + 1,
                  " has a score; the first: ", groups[0].completions[0].error,
                  "; hint: remove the cause, and the same command continues ", output));
}

}  // namespace

Json sample_problems(const RunPlan& plan, const LoadedModel& loaded, const SampleRequest& request) {
  const TrainConfig& config = plan.stages.back();
  const ModelConfig& model = loaded.model->config();
  const Tokenizer& tokenizer = *loaded.tokenizer;
  model.require_decoder();
  check_request(config, request);
  const RewardSet rewards(config.rewards,
                          config.data.task.empty() ? nullptr : &find_task(config.data.task));
  LineMaker maker(request, config, tokenizer, model.context, rewards.names());
  Dataset data{.tokenizer = make_tokenizer(tokenizer.files(), loaded.checkpoint)};
  const EvalSet set = with_path("--problems", [&] {
    return load_eval_set(
        {config.eval, config, config.rewards, {}},
        {.path = request.problems, .max_completion_length = config.sampling.max_completion_length},
        "--problems", data, model.context, model.context_limit());
  });
  if (!set.too_long.empty()) logging::info("data.too_long: ", set.too_long);
  const SamplingConfig sampling = sampling_for(config.sampling, config.data, tokenizer);
  Engine engine(*loaded.model, config.rollout);
  const auto environment = environment_of(config.environment, config.data, tokenizer);
  const Sampler sampler(engine, tokenizer, sampling,
                        dialogue_options(config.environment, environment.get()));
  ResumableFile output(request.output, settings_of(config, loaded, sampling, set, request));
  if (!output.state().is_null()) maker.restore(output.state());
  const std::span problems(set.problems);
  while (maker.count("problems") < std::ssize(problems)) {
    const int64_t begin = maker.count("problems"),
                  size = std::min(config.batch.prompts_per_step, std::ssize(problems) - begin);
    const std::vector<Group> groups = sample_and_score(
        sampler, rewards, problems.subspan(static_cast<size_t>(begin), static_cast<size_t>(size)),
        {.seed = static_cast<uint64_t>(config.seed), .step = kAddressStep}, begin, request.num);
    check_failures(groups, maker.count("failed") < maker.count("completions"), request.output);
    for (const Group& group : groups) {
      const std::string lines = maker.lines_of(group);
      output.append(lines, maker.counts());
    }
    logging::info("problems: ", begin + size, " of ", problems.size(), ", ", maker.count("kept"),
                  " kept, ", maker.count("solved"), " solved, ", maker.count("failed"), " failed");
  }
  if (!maker.first_error().empty())
    logging::warn(maker.count("failed"), " of ", maker.count("completions"),
                  " completions have no score and are not kept; the first: ", maker.first_error());
  return maker.counts();
}

}  // namespace cohort
