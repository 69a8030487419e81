// The table of rewards, and sets of them.
#include "rl/reward.h"

#include <algorithm>
#include <cmath>

#include "rl/advantage.h"
#include "rl/rewards/external.h"
#include "rl/rewards/rewards.h"
#include "text/tokenizers/json_fields.h"
#include "text/utf8.h"

namespace cohort {

const std::vector<RewardEntry>& reward_table() {
#define COHORT_REWARD_ENTRY(name, description, keys) {#name, description, keys, make_##name},
#define COHORT_EXTERNAL_ENTRY(name, description, keys) {#name, description, keys, nullptr},
  static const std::vector<RewardEntry> table = {
      COHORT_REWARDS(COHORT_REWARD_ENTRY, COHORT_EXTERNAL_ENTRY)};
#undef COHORT_REWARD_ENTRY
#undef COHORT_EXTERNAL_ENTRY
  return table;
}

namespace {

// Outcomes of the reward `code` -> the ends of their metrics' names.
constexpr std::pair<const char*, const char*> kCodeOutcomes[] = {
    {"passed", "/passed"}, {"timeout", "/timeouts"}, {"no_code", "/no_code"}};

std::vector<std::string> reward_names() {
  std::vector<std::string> names;
  for (const RewardEntry& entry : reward_table()) names.emplace_back(entry.name);
  return names;
}

const RewardEntry& find_reward(const RewardConfig& config) {
  static const RewardEntry callback{"", "a callback", "", nullptr};
  if (config.program.callback != nullptr) return callback;
  for (const RewardEntry& entry : reward_table())
    if (config.name == entry.name) return entry;
  throw InputError(str(
      "unknown reward; known: ", join(reward_names(), ", "),
      did_you_mean(config.name, reward_names(),
                   config.name.ends_with(".py")
                       ? "; hint: " + function_reward(config.name)
                       : "; hint: cohort.train() and others in Python take functions: rewards=")));
}

bool takes(const RewardEntry& entry, const std::string& key) {
  return has_word("name weight", key) || has_word(entry.keys, key);
}

// The best value over the answers of an example, any of which is right.
RewardFn any_answer(RewardFn reward) {
  return [reward = std::move(reward)](const RewardInput& in) {
    double best = reward(in);
    RewardInput other = in;
    for (const std::string& answer : in.example.other_answers) {
      other.other_answer = &answer;
      best = std::fmax(best, reward(other));  // the number where one of them is NaN
    }
    return best;
  };
}

RewardFn make_entry(const RewardConfig& config, const Task* task) {
  const RewardEntry& entry = find_reward(config);
  const ConfigFields given = config_fields(config), defaults = config_fields(RewardConfig{});
  for (size_t i = 0; i < given.size(); ++i)
    if (given[i] != defaults[i] && !takes(entry, given[i].first))
      throw InputError(str(given[i].first, ": this reward does not take it; hint: it takes name, ",
                           "weight and ", *entry.keys == 0 ? "no other key" : entry.keys));
  return entry.make == nullptr ? nullptr : any_answer(entry.make(config, task));
}

}  // namespace

RewardFn make_reward(const RewardConfig& config, const Task* task) {
  RewardFn reward = make_entry(config, task);
  if (takes(find_reward(config), "correct"))
    throw InputError(str(config.name, " is computed from another reward of the list; hint: use ",
                         "that one, ", config.correct));
  return reward;
}

bool scores_tokens(const RewardConfig& config) {
  const RewardEntry& entry = find_reward(config);
  return takes(entry, "penalty") || takes(entry, "correct");
}

RewardInput reward_input(const Example& example, const Trajectory& trajectory, int64_t step) {
  RewardInput in{example, trajectory.text, trajectory.index, step};
  in.max_tokens = trajectory.max_tokens;
  in.stop_reason = trajectory.stop_reason;
  in.environment_reward = trajectory.environment_reward;
  if (!trajectory.transcript.is_null()) in.transcript = &trajectory.transcript;
  if (trajectory.tokens.empty()) return in;
  std::vector<int32_t>& tokens = in.tokens.emplace();
  for (size_t i = 0; i < trajectory.tokens.size(); ++i)
    if (trajectory.loss_mask[i] == 1) tokens.push_back(trajectory.tokens[i]);
  return in;
}

void CodeConfig::visit(ConfigVisitor& v) {
  static constexpr EnumName<std::string_view> kFences[] = {{"required", "required"},
                                                           {"optional", "optional"}};
  static constexpr EnumName<std::string_view> kCredits[] = {{"all", "all"}, {"share", "share"}};
  v.choice("fence", fence, kFences,
           "code: optional: a completion without a fenced block is code as a whole");
  v.field("prefix", prefix, "code: text before the block; {prompt} is the prompt");
  v.choice("credit", credit, kCredits, "code: 1 if all tests pass, or the fraction that does");
  v.field(
      "inside", inside,
      "code: the tests run in the solution's process, which can forge their outcome; for results "
      "that are no literals");
  visit_sandbox(v, sandbox);
}

void visit_sandbox(ConfigVisitor& v, std::string& sandbox) {
  static constexpr EnumName<std::string_view> kSandboxes[] = {{"auto", "auto"},
                                                              {"namespaces", "namespaces"},
                                                              {"landlock", "landlock"},
                                                              {"rlimits", "rlimits"}};
  v.choice("sandbox", sandbox, kSandboxes,
           "code, python: auto: namespaces, or landlock; rlimits limits resources only");
}

void RewardConfig::visit(ConfigVisitor& v) {
  static const std::string known = "one of: " + join(reward_names(), ", ");
  v.field("name", name, known.c_str());
  v.field("weight", weight, "weight in the sum of rewards");
  v.field("pattern", pattern,
          "regular expression: for format it must match the whole completion, for the others it "
          "finds the answer (group 1 of the last match; empty: the whole completion)");
  program.visit(v);
  server.visit(v);
  v.field("concurrent", concurrent, "http, judge: requests at a time, per rank",
          {.min = 1, .max = 1024});
  judge.visit(v);
  code.visit(v);
  v.field("batch", batch, "command, http: a request is a list of completions");
  v.field("penalty", penalty,
          "overlong, length, repetition: what is subtracted at most, before the weight",
          {.min = 0, .max = 1e9});
  v.field("max_length", max_length,
          "overlong, length, cosine: tokens at which the value stops changing; 0: "
          "max_completion_length",
          {.min = 0, .max = 1 << 24});
  v.field("buffer", buffer, "overlong: tokens before max_length over which the penalty grows",
          {.min = 0, .max = 1 << 24});
  v.field("n", n, "repetition: tokens of an n-gram", {.min = 1, .max = 64});
  v.field("correct", correct, "cosine: name of the reward that says which answers are right");
  v.field("threshold", threshold, "cosine: an answer is right if that reward is at least this",
          {.min = -1e9, .max = 1e9});
  v.field("right", right, "cosine: values of a right answer of no tokens and of max_length",
          {.min = -1e9, .max = 1e9});
  v.field("wrong", wrong, "cosine: values of a wrong answer of no tokens and of max_length",
          {.min = -1e9, .max = 1e9});
}

AnswerFinder::AnswerFinder(const std::string& pattern)
    : regex_(pattern.empty() ? nullptr : std::make_shared<const Regex>(pattern)) {}

std::optional<std::string> AnswerFinder::find(std::string_view text) const {
  if (!regex_) return std::string(text);
  auto match = regex_->find_last(text);
  if (!match) return {};
  return std::move((*match)[match->size() > 1 ? 1 : 0]);
}

RewardSet::RewardSet(const std::vector<RewardConfig>& configs, const Task* task,
                     const std::shared_ptr<ExternalReward>& running) {
  std::vector<std::shared_ptr<ExternalReward>> programs;
  if (running != nullptr) programs.push_back(running);
  const auto programs_of = [&](const RewardConfig& config) -> std::shared_ptr<ExternalReward> {
    if (!is_external(config)) return nullptr;
    for (const auto& known : programs)
      if (known->runs(config)) return known;
    return programs.emplace_back(std::make_shared<ExternalReward>(config));
  };
  for (size_t i = 0; i < configs.size(); ++i) {
    const RewardConfig& config = configs[i];
    with_path(str("rewards[", i, "] '", config.name, "'"), [&] {
      rewards_.push_back(make_entry(config, task));
      external_.push_back(programs_of(config));
      if (!std::isfinite(config.weight)) throw InputError("weight must be finite");
    });
    const auto repeats = std::count_if(configs.begin(), configs.begin() + static_cast<long>(i),
                                       [&](const auto& c) { return c.name == config.name; });
    names_.push_back(repeats == 0 ? config.name : str(config.name, "_", repeats + 1));
    weights_.push_back(config.weight);
  }
  find_criteria(configs);
}

void RewardSet::find_criteria(const std::vector<RewardConfig>& configs) {
  std::vector<std::string> others;
  for (size_t i = 0; i < configs.size(); ++i)
    if (configs[i].correct.empty()) {
      others.push_back(names_[i]);
      order_.push_back(i);
    }
  criteria_.resize(configs.size());
  for (size_t i = 0; i < configs.size(); ++i) {
    const std::string& correct = configs[i].correct;
    if (correct.empty()) continue;
    if (std::ranges::find(others, correct) == others.end())
      throw InputError(str("rewards[", i, "] '", configs[i].name, "': correct: '", correct,
                           "' is none of the other rewards: ", join(others, ", "),
                           did_you_mean(correct, others)));
    criteria_[i] = static_cast<size_t>(std::ranges::find(names_, correct) - names_.begin());
    order_.push_back(i);
  }
}

void RewardSet::submit(const Example& example, const Trajectory& trajectory, int64_t step) const {
  if (!trajectory.environment_error.empty()) return;
  for (const auto& reward : external_)
    if (reward != nullptr) reward->submit(reward_input(example, trajectory, step));
}

RewardSet::Scores RewardSet::score(std::span<const Example> prompts,
                                   std::span<const Trajectory> trajectories, int64_t step) const {
  const size_t samples = trajectories.size(), group = samples / std::max<size_t>(1, prompts.size());
  COHORT_CHECK(samples == prompts.size() * group,
               "[reward] expected as many completions of each of ", prompts.size(),
               " prompts, got ", samples);
  Scores scores;
  scores.each.assign(rewards_.size(), std::vector<double>(samples));
  scores.total.assign(samples, kNotApplicable);
  scores.failed.resize(rewards_.size());
  scores.first_error.resize(rewards_.size());
  scores.errors.resize(samples);
  for (size_t s = 0; s < samples; ++s) submit(prompts[s / group], trajectories[s], step);
  std::map<const ExternalReward*, std::map<int64_t, ExternalReward::Result>> answers;
  for (size_t k = 0; k < rewards_.size(); ++k) {
    ExternalReward* command = external_[k].get();
    if (command == nullptr) continue;
    scores.failed[k] = 0;
    if (command->is_code())
      for (const auto& [outcome, metric] : kCodeOutcomes) scores.counts[names_[k] + metric] = 0;
    if (!answers.contains(command)) answers[command] = command->collect();  // rewards may share it
  }
  for (size_t s = 0; s < samples; ++s) {
    const std::string& text = trajectories[s].text;
    if (!trajectories[s].environment_error.empty()) {
      for (std::vector<double>& values : scores.each) values[s] = kNotApplicable;
      continue;
    }
    const auto require_finite = [&](double value, const std::string& name) {
      if (std::isinf(value))
        throw InputError(str("reward ", name, " is infinite for completion ", s, ", ",
                             excerpt(text), "; hint: rewards and weights must stay finite"));
    };
    RewardInput input = reward_input(prompts[s / group], trajectories[s], step);
    for (const size_t k : order_) {
      double& value = scores.each[k][s];
      if (external_[k] == nullptr) {
        if (criteria_[k]) input.correct = scores.each[*criteria_[k]][s];
        value = rewards_[k](input);
      } else {
        const auto& result = answers.at(external_[k].get()).at(trajectories[s].index);
        value = result.value;
        if (!result.error.empty() && (*scores.failed[k])++ == 0)
          scores.first_error[k] = result.error;
        if (!result.error.empty() && scores.errors[s].empty())
          scores.errors[s] = str("reward ", names_[k], ": ", result.error);
        for (const auto& [outcome, metric] : kCodeOutcomes)
          if (result.outcome == outcome) ++scores.counts[names_[k] + metric];
      }
      require_finite(value, names_[k]);
    }
    std::vector<double> values;
    for (const std::vector<double>& each : scores.each) values.push_back(each[s]);
    scores.total[s] = weighted_sum(weights_, values);
    require_finite(scores.total[s], "total");
  }
  for (size_t k = 0; k < names_.size(); ++k)
    if (scores.failed[k]) scores.counts[str("rewards/", names_[k], "/failed")] = *scores.failed[k];
  return scores;
}

}  // namespace cohort
