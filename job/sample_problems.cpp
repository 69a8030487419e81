#include "job/sample_problems.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
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

// A condition on a reward, or on the weighted sum of all.
struct Condition {
  size_t reward;  // the number of rewards: the sum
  std::string op;
  double limit;
  bool holds(const ScoredCompletion& c) const {
    const double value = reward < c.rewards.size() ? c.rewards[reward] : c.reward;
    return (value == limit && op.ends_with('=')) || (value < limit && op[0] == '<') ||
           (value > limit && op[0] == '>');
  }
};

std::vector<Condition> parse_conditions(const std::vector<std::string>& keep,
                                        std::vector<std::string> names) {
  names.emplace_back(kSum);
  std::vector<Condition> out;
  for (const std::string& text : keep) {
    char name[128] = "", op[3] = "";
    double limit = NAN;
    int end = 0;
    std::sscanf(text.c_str(), " %127[^<>= ] %2[<>=] %lf %n", name, op, &limit, &end);
    if (end != std::ssize(text) || !std::isfinite(limit) || !has_word(">= <= > < ==", op))
      throw InputError(str("--keep: '", text, "': expected NAME OP NUMBER, such as \"", names[0],
                           " >= 1\"; OP is one of >=, <=, >, < and =="));
    const auto found = std::ranges::find(names, name);
    if (found == names.end())
      throw InputError(str("--keep: no reward is called '", name, "'; there are ",
                           join(names, ", "), did_you_mean(name, names)));
    out.push_back({static_cast<size_t>(found - names.begin()), op, limit});
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
  LineMaker(const SampleRequest& request, const DataConfig& data,
            const std::vector<std::string>& names)
      : request_(request),
        data_(data),
        names_(names),
        conditions_(parse_conditions(request.keep, names)) {
    for (const char* name : {"problems", "completions", "kept", "solved", "failed", "truncated"})
      counts.set(name, 0);
  }

  // Counts a problem and returns its lines.
  std::string lines_of(const Group& group) {
    const auto reward = [](const ScoredCompletion* c) { return c->reward; };
    const bool pairs = request_.choice == SampleChoice::kPairs;
    add("problems", 1);
    std::vector<const ScoredCompletion*> scored = scored_of(group), kept;
    std::set<std::string> texts;
    for (const ScoredCompletion* c : scored)
      if (std::ranges::all_of(conditions_, [&](const Condition& each) { return each.holds(*c); }) &&
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
    }
    return out;
  }

  int64_t count(const char* name) const { return counts.at(name).as_int(); }

  Json counts;              // the numbers that sample_problems() returns
  std::string first_error;  // the first completion's that failed; empty: none has

 private:
  void add(const char* name, int64_t number) { counts.set(name, count(name) + number); }

  // The completions that may be kept, or be the worst: whole ones with a score. Counts the others.
  std::vector<const ScoredCompletion*> scored_of(const Group& group) {
    std::vector<const ScoredCompletion*> out;
    for (const ScoredCompletion& c : group.completions) {
      const bool failed = !c.error.empty(), truncated = !failed && c.truncated();
      // Bytes that are not UTF-8 would be taught as replacement characters.
      const bool is_text = c.text.find("\xef\xbf\xbd") == c.text.npos;
      if (!failed && !truncated && is_text && !std::isnan(c.reward)) out.push_back(&c);
      add("completions", 1);
      add("failed", failed);
      add("truncated", truncated);
      if (first_error.empty()) first_error = c.error;
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
    const bool is_text = example.conversation.is_null();
    Json line = Json()
                    .set("prompt", is_text ? Json(example.prompt) : example.conversation)
                    .set(name, completion_of(group, c));
    if (is_text) return line;
    Json others;
    if (!data_.tools.is_null()) line.set("tools", data_.tools);
    for (const Json& variables :
         {parse_template_kwargs(data_.chat_template_kwargs, "data.chat_template_kwargs"),
          example.template_variables})
      if (!variables.is_null())
        for (const auto& [key, value] : variables.as_object())
          (key == "tools" ? line : others).set(key, value);
    return others.is_null() ? line : line.set("chat_template_kwargs", others);
  }

  const SampleRequest& request_;
  const DataConfig& data_;
  const std::vector<std::string>& names_;
  const std::vector<Condition> conditions_;
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
                      {"device", config.device.substr(0, config.device.find(':'))},
                      {"--num", str(request.num)},
                      {"--keep", join(request.keep, ",")},
                      {"--most", str(request.most)},
                      {"--distinct", str(request.distinct)},
                      {"choice", kChoices[static_cast<int>(request.choice)]}};
  for (const auto& field : config_fields(sampling)) out.push_back(field);
  for (const auto& field : config_fields(config))
    if (field.first.starts_with("rewards") || field.first.starts_with("environment.") ||
        has_word("seed dtype data.chat_template_kwargs", field.first))
      out.push_back(field);
  return out;
}

void check_request(const TrainConfig& config, const SampleRequest& request) {
  if (config.rewards.empty())
    throw InputError(
        "rewards: there are none to score completions by; hint: --rewards CONFIG.yaml, such as the "
        "file of a grpo run");
  if (config.environment.is_set() && !config.data.is_chat())
    throw InputError(
        "environment: lines of texts cannot have observations; hint: data.chat=true, which makes "
        "problems conversations");
  if (request.choice == SampleChoice::kPairs && request.num < 2)
    throw InputError("--pairs: a pair needs two completions; hint: --num 8");
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

// So many problems in a row of which all completions fail are an outage.
constexpr size_t kOutage = 3;

}  // namespace

Json sample_problems(const RunPlan& plan, const LoadedModel& loaded, const SampleRequest& request) {
  const TrainConfig& config = plan.stages.back();
  const ModelConfig& model = loaded.model->config();
  const Tokenizer& tokenizer = *loaded.tokenizer;
  model.require_decoder();
  check_request(config, request);
  const RewardSet rewards(config.rewards,
                          config.data.task.empty() ? nullptr : &find_task(config.data.task));
  LineMaker maker(request, config.data, rewards.names());
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
  if (!output.state().is_null()) maker.counts = output.state();
  const std::span problems(set.problems);
  std::vector<Group> waiting;
  while (maker.count("problems") < std::ssize(problems)) {
    const int64_t begin = maker.count("problems") + std::ssize(waiting),
                  size = std::min(config.batch.prompts_per_step, std::ssize(problems) - begin);
    const std::vector<Group> groups = sample_and_score(
        sampler, rewards, problems.subspan(static_cast<size_t>(begin), static_cast<size_t>(size)),
        {.seed = static_cast<uint64_t>(config.seed), .step = kAddressStep}, begin, request.num);
    for (const Group& group : groups) {
      // Problems that fail wait for one that does not, or for the end: those of an outage are not
      // written, and the next call samples them.
      waiting.push_back(group);
      const bool failed =
          std::ranges::none_of(group.completions, &std::string::empty, &ScoredCompletion::error);
      const bool is_last = begin + size == std::ssize(problems) && &group == &groups.back();
      const bool any_score = !failed || maker.count("failed") < maker.count("completions");
      if (waiting.size() >= kOutage ? failed : is_last && !any_score)
        throw Error(
            str("the completions of ", waiting.size(), " problems in a row, up to problem ",
                group.index + 1, ", have no score; the first: ", waiting[0].completions[0].error,
                "; hint: remove the cause, and the same command continues ", request.output));
      if (failed && !is_last) continue;
      for (const Group& each : waiting) {
        const std::string lines = maker.lines_of(each);  // counts them
        output.append(lines, maker.counts);
      }
      waiting.clear();
    }
    logging::info("problems: ", begin + size, " of ", problems.size(), ", ", maker.count("kept"),
                  " kept, ", maker.count("solved"), " solved, ", maker.count("failed"), " failed");
  }
  if (maker.count("failed") > 0)
    logging::warn(maker.count("failed"), " of ", maker.count("completions"),
                  " completions have no score and are not kept",
                  maker.first_error.empty() ? "" : "; the first: " + maker.first_error);
  return maker.counts;
}

}  // namespace cohort
