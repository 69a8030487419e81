#include "rl/rewards/command.h"

#include <cmath>

#include "core/log.h"
#include "rl/rewards/rewards.h"
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

}  // namespace

CommandReward::CommandReward(const RewardConfig& config)
    : config_(config),
      caller_("reward " + config.name,
              config.name == "code" ? code_program(config) : config.program,
              {.validate = validate_answer}) {}

bool CommandReward::runs(const RewardConfig& config) const {
  RewardConfig same = config;
  same.weight = config_.weight;
  return same == config_;
}

void CommandReward::submit(const RewardInput& in) {
  caller_.start();  // also for `batch`: programs start while others sample
  if (!submitted_.emplace(in.index, excerpt(in.completion)).second) return;
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
  caller_.submit(request, {.index = in.index});
}

// Sends one list to each program. Keys are the lists' numbers.
void CommandReward::send_lists() {
  const int64_t count = config_.program.workers.value_or(1), size = std::ssize(unsent_);
  for (int64_t i = 0; i < count; ++i) {
    const Json::Array list(unsent_.begin() + size * i / count,
                           unsent_.begin() + size * (i + 1) / count);
    for (const Json& request : list) lists_[i].push_back(request.at("index").as_int());
    if (!list.empty()) caller_.submit(list, {.index = i});
  }
  unsent_.clear();
}

CommandReward::Result CommandReward::result_of(const Json& answer, int64_t index) const {
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
  return {value, ""};
}

std::map<int64_t, CommandReward::Result> CommandReward::collect() {
  send_lists();
  std::map<int64_t, Result> out;
  for (const auto& [answer, error, key] : caller_.take(WorkerPool::Wait::kAll)) {
    if (sandbox_.empty() && answer.is_object())
      if (const Json* sandbox = answer.find("sandbox");
          sandbox != nullptr && sandbox->is_string()) {
        sandbox_ = sandbox->as_string();
        if (config_.code.sandbox == "rlimits")
          logging::warn(
              "reward code: solutions can read and write this user's files, since sandbox: rlimits "
              "limits resources only");
        else
          logging::info("reward code: sandbox ", sandbox_);
      }
    if (!config_.batch)
      out[key.index] = error.empty() ? result_of(answer, key.index) : Result{kNotApplicable, error};
    else if (!error.empty())
      for (const int64_t index : lists_.at(key.index)) out[index] = {kNotApplicable, error};
    else
      for (const Json& one : answer.as_array())
        out[one.at("index").as_int()] = result_of(one, one.at("index").as_int());
  }
  submitted_.clear();
  lists_.clear();
  return out;
}

// A program is not a function of one completion: RewardSet submits to it and collects from it.
RewardFn make_command(const RewardConfig&, const Task*) {
  return nullptr;
}

}  // namespace cohort
