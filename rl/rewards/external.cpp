#include "rl/rewards/external.h"

#include <cmath>

#include "core/text.h"
#include "sys/files.h"
#include "text/utf8.h"

namespace cohort {
namespace {

// Returns what is wrong with an answer to a single request; empty: it is valid.
std::string validate_single(const Json& request, const Json& answer) {
  if (!answer.is_object()) return "its answer is not an object";
  const Json* index = answer.find("index");
  if (index == nullptr || !index->is_int() || index->as_int() != request.at("index").as_int())
    return "its answer does not have the index of the request";
  const Json *reward = answer.find("reward"), *error = answer.find("error");
  if (error != nullptr) return error->is_string() ? "" : "its 'error' is not a string";
  if (reward == nullptr) return "its answer has neither 'reward' nor 'error'";
  if (reward->is_null()) return "";
  if (!reward->is_number()) return "its 'reward' is neither a number nor null";
  return std::isfinite(reward->as_double()) ? "" : "its 'reward' is not finite";
}

std::string validate_answer(const std::string& request_line, const std::string& answer_line) {
  Json request = parse_json(request_line, "request"), answer;
  try {
    answer = parse_json(answer_line, "answer");
  } catch (const InputError&) {
    return "its answer is not valid JSON: " + excerpt(answer_line);
  }
  if (!request.is_array()) return validate_single(request, answer);
  const Json::Array& requests = request.as_array();
  if (!answer.is_array() || answer.as_array().size() != requests.size())
    return str("its answer is not a list of ", requests.size(), " objects");
  for (size_t i = 0; i < requests.size(); ++i)
    if (std::string error = validate_single(requests[i], answer.as_array()[i]); !error.empty())
      return error;
  return "";
}

// The reward of an answer of a server, or the list of those of a batch; nullopt: it has an error.
std::optional<Json> rewards_of(const Json& answer) {
  if (!answer.is_array())
    return answer.find("error") != nullptr ? std::nullopt : std::optional(answer.at("reward"));
  Json::Array out;
  for (const Json& one : answer.as_array()) {
    const std::optional<Json> reward = rewards_of(one);
    if (!reward) return std::nullopt;
    out.push_back(*reward);
  }
  return out;
}

}  // namespace

ExternalReward::ExternalReward(const RewardConfig& config)
    : config_(config),
      judge_(config.name == "judge" ? std::optional<Judge>(std::in_place, config) : std::nullopt),
      caller_("reward " + config.name,
              config.name == "code" ? code_program(config.program, config.code) : config.program,
              is_served(config) ? config.server.validate() : config.server,
              {.concurrent = is_served(config) ? static_cast<size_t>(config.concurrent) : 1,
               .validate = [this](const auto& request, const auto& answer) {
                 return take_answer(request, answer);
               }}) {}

std::string ExternalReward::take_answer(const std::string& request, const std::string& answer) {
  std::optional<Json> score;
  std::string text, error;
  if (judge_) {
    try {
      const Json json = parse_json(answer, "its answer");
      score = with_location(json, "its answer", [&] { return judge_->score(json, text); });
    } catch (const InputError& e) {
      error = e.what();
      if (!text.empty()) score = Json().set("error", error);
    }
  } else {
    error = validate_answer(request, answer);
    if (!log_ || !error.empty()) return error;
    score = rewards_of(parse_json(answer, "its answer"));
    text = answer;
  }
  if (score) log_->add(hash_of(request), *score, text);
  return error;
}

std::string ExternalReward::hash_of(const std::string& request) const {
  const JudgeConfig& judge = config_.judge;
  std::string scale;
  for (const double score : judge.scale) scale += str(format_double(score), ' ');
  return hex(checksum(
      request, checksum(join({config_.server.url, config_.pattern, judge.field, scale}, "\n"))));
}

bool ExternalReward::runs(const RewardConfig& config) const {
  RewardConfig same = config;
  same.weight = config_.weight;
  return same == config_;
}

void ExternalReward::submit(const RewardInput& in) {
  caller_.start();  // also for `batch`: programs start while others sample
  if (is_served(config_) && !log_) log_ = AnswerLog::open(config_.answers);
  if (!submitted_.emplace(in.index, excerpt(in.completion)).second) return;
  for (int64_t vote = 0; judge_ && vote < config_.judge.votes; ++vote)
    ask(judge_->request(in, vote), {in.index, vote});
  if (judge_) return;
  Json request;
  request.set("index", in.index)
      .set("step", in.step)
      .set("prompt", in.example.prompt)
      .set("completion", std::string(in.completion))
      .set("answer", in.example.answer)
      .set("fields", in.example.fields);
  if (!in.example.messages.is_null()) request.set("messages", in.example.messages);
  if (in.tokens)
    request.set("length", static_cast<int64_t>(in.tokens->size()))
        .set("max_length", in.max_tokens)
        .set("truncated", in.truncated())
        .set("stop_reason", stop_reason_name(in.stop_reason));
  if (in.transcript != nullptr) request.set("transcript", *in.transcript);
  if (config_.batch) return unsent_.push_back(std::move(request));
  ask(request, {.index = in.index});
}

void ExternalReward::ask(const Json& request, Key key) {
  if (!log_) return caller_.submit(request, key);
  const std::string hash = hash_of(request.dump());
  std::vector<Key>& equal = asked_[hash];
  equal.push_back(key);
  if (equal.size() == 1 && !log_->find(hash)) caller_.submit(request, key);
}

Json ExternalReward::answer_of(Key key, const Json& score) const {
  if (!config_.batch) return Json().set("index", key.index).set("reward", score);
  Json out = Json::Array{};
  for (size_t i = 0; i < score.as_array().size(); ++i)
    out.push_back(
        Json().set("index", lists_.at(key.index).at(i)).set("reward", score.as_array()[i]));
  return out;
}

// Sends one list to each program, or as many to a server as it has requests at a time.
void ExternalReward::send_lists() {
  const int64_t count =
                    is_served(config_) ? config_.concurrent : config_.program.workers.value_or(1),
                size = std::ssize(unsent_);
  for (int64_t i = 0; i < count; ++i) {
    const Json::Array list(unsent_.begin() + size * i / count,
                           unsent_.begin() + size * (i + 1) / count);
    for (const Json& request : list) lists_[i].push_back(request.at("index").as_int());
    if (!list.empty()) ask(list, {.index = i});
  }
  unsent_.clear();
}

ExternalReward::Result ExternalReward::result_of(const Json& answer, int64_t index) const {
  if (const Json* error = answer.find("error"))
    return {kNotApplicable, "it reports: " + excerpt(error->as_string(), 160, 80)};
  const Json& reward = config_.program.callback != nullptr ? answer : answer.at("reward");
  const double value = reward.is_number() ? reward.as_double() : kNotApplicable;
  if (!reward.is_null() && !std::isfinite(value))
    throw InputError(str("reward ", config_.name, ": its function returned ",
                         reward.is_number()   ? str(value)
                         : reward.is_string() ? excerpt(reward.as_string())
                                              : excerpt(reward.dump()),
                         " for completion ", index, ", ", submitted_.at(index),
                         "; hint: a finite number, or none where it does not apply"));
  const std::string* outcome = is_code() ? answer.find_text("outcome") : nullptr;
  return {value, "", outcome == nullptr ? "" : *outcome};
}

void ExternalReward::add(Key key, const Json& answer, const std::string& error,
                         std::map<int64_t, Result>& out) const {
  if (!config_.batch) {
    const Result one = error.empty() ? result_of(answer, key.index) : Result{kNotApplicable, error};
    Result& result = out[key.index];
    result.value += judge_ ? one.value / static_cast<double>(config_.judge.votes) : one.value;
    if (result.error.empty()) result.error = one.error;
    result.outcome = one.outcome;
  } else if (!error.empty()) {
    for (const int64_t index : lists_.at(key.index)) out[index] = {kNotApplicable, error};
  } else {
    for (const Json& one : answer.as_array())
      out[one.at("index").as_int()] = result_of(one, one.at("index").as_int());
  }
}

std::map<int64_t, ExternalReward::Result> ExternalReward::collect() {
  send_lists();
  std::map<int64_t, Result> out;
  // Votes are added in their order, whichever of them the log had.
  std::map<Key, std::pair<Json, std::string>> answers;  // and errors
  for (auto& [answer, error, key] : caller_.take(RequestPool::Wait::kAll)) {
    if (is_code() && sandbox_.empty() && answer.find_text("sandbox") != nullptr) {
      sandbox_ = answer.at("sandbox").as_string();
      log_sandbox("reward code", config_.code, sandbox_);
    }
    answers[key] = {std::move(answer), error};
  }
  // The log's score is that of the first answer, which another rank or an earlier process may have
  // had.
  for (const auto& [hash, equal] : asked_) {
    const std::optional<Json> score = log_->find(hash);
    for (const Key& key : equal)
      answers[key] = score ? std::pair(answer_of(key, *score), "") : answers.at(equal[0]);
  }
  for (const auto& [key, answer] : answers) add(key, answer.first, answer.second, out);
  submitted_.clear();
  lists_.clear();
  asked_.clear();
  return out;
}

}  // namespace cohort
