#include "rl/rewards/command.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include "core/log.h"
#include "data/utf8.h"
#include "rl/rewards/rewards.h"

namespace cohort {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// The message of what is wrong with one answer to one request; empty: nothing.
std::string fault_of_one(const Json& request, const Json& answer) {
  if (!answer.is_object()) return "its answer is no object";
  const Json* index = answer.find("index");
  if (index == nullptr || !index->is_int() || index->as_int() != request.at("index").as_int())
    return "its answer does not have the index of the request";
  const Json *reward = answer.find("reward"), *error = answer.find("error");
  if (error != nullptr) return error->is_string() ? "" : "its 'error' is no text";
  if (reward == nullptr) return "its answer has neither 'reward' nor 'error'";
  if (reward->is_null()) return "";
  if (!reward->is_number()) return "its 'reward' is neither a number nor null";
  return std::isfinite(reward->as_double()) ? "" : "its 'reward' is not finite";
}

std::string fault_of(const std::string& request, const std::string& answer) {
  Json asked = parse_json(request, "request"), said;
  try {
    said = parse_json(answer, "answer");
  } catch (const InputError&) {
    return "its answer is no JSON: " + excerpt(answer);
  }
  if (!asked.is_array()) return fault_of_one(asked, said);
  if (!said.is_array() || said.as_array().size() != asked.as_array().size())
    return str("its answer is no list of ", asked.as_array().size());
  for (size_t i = 0; i < said.as_array().size(); ++i)
    if (std::string fault = fault_of_one(asked.as_array()[i], said.as_array()[i]); !fault.empty())
      return fault;
  return "";
}

CommandReward::Result result_of(const Json& answer) {
  if (const Json* error = answer.find("error"))
    return {kNaN, "it says: " + excerpt(error->as_string())};
  const Json& reward = answer.at("reward");
  return {reward.is_null() ? kNaN : reward.as_double(), ""};
}

}  // namespace

CommandReward::CommandReward(const RewardConfig& config)
    : batch_(config.batch),
      options_{.program = {.command = split_command(config.run),
                           .directory = config.directory,
                           .memory = config.memory << 20},
               .workers = static_cast<int>(config.workers),
               .timeout = config.timeout,
               .start_timeout = std::max(config.timeout, config.start_timeout),
               .fault_of = fault_of} {}

void CommandReward::submit(const RewardInput& in) {
  if (pool_ == nullptr) pool_ = std::make_unique<WorkerPool>(worker_host(), options_);
  if (!known_.insert(in.index).second) return;
  Json request;
  request.set("index", in.index)
      .set("step", in.step)
      .set("prompt", in.example.prompt)
      .set("completion", std::string(in.completion))
      .set("answer", in.example.answer)
      .set("fields", in.example.fields);
  if (!in.example.messages.is_null()) request.set("messages", in.example.messages);
  if (batch_) return waiting_.push_back(std::move(request));
  asked_.push_back({in.index});
  pool_->submit(request.dump());
}

// A list for each program.
void CommandReward::flush() {
  const auto lists = static_cast<size_t>(options_.workers);
  for (size_t i = 0; i < lists; ++i) {
    const auto place = [&](size_t part) {
      return waiting_.begin() + static_cast<std::ptrdiff_t>(waiting_.size() * part / lists);
    };
    const Json::Array list(place(i), place(i + 1));
    if (list.empty()) continue;
    for (std::vector<int64_t>& indices = asked_.emplace_back(); const Json& request : list)
      indices.push_back(request.at("index").as_int());
    pool_->submit(Json(list).dump());
  }
  waiting_.clear();
}

std::map<int64_t, CommandReward::Result> CommandReward::collect() {
  if (pool_ == nullptr) return {};
  flush();
  std::map<int64_t, Result> out;
  const std::vector<WorkerPool::Answer> answers = pool_->collect();
  for (size_t i = 0; i < answers.size(); ++i) {
    const auto& [line, fault] = answers[i];
    const Json answer = fault.empty() ? parse_json(line, "answer") : Json();
    for (size_t k = 0; k < asked_[i].size(); ++k)
      out[asked_[i][k]] = !fault.empty() ? Result{kNaN, fault}
                          : batch_       ? result_of(answer.as_array()[k])
                                         : result_of(answer);
  }
  asked_.clear();
  known_.clear();
  return out;
}

std::shared_ptr<CommandReward> shared_command(const RewardConfig& config) {
  thread_local std::map<std::string, std::weak_ptr<CommandReward>> known;
  std::string key;
  for (const auto& [name, value] : config_fields(config))
    if (name != "weight") key += name + '=' + value + '\n';
  std::shared_ptr<CommandReward> found = known[key].lock();
  if (found == nullptr) known[key] = found = std::make_shared<CommandReward>(config);
  return found;
}

RewardFn make_command(const RewardConfig& config, const Task*) {
  return [command = shared_command(config)](const RewardInput& in) {
    command->submit(in);
    const CommandReward::Result result = command->collect().at(in.index);
    if (!result.fault.empty()) logging::warn("reward command: ", result.fault);
    return result.value;
  };
}

std::vector<std::string> split_command(const std::string& text) {
  std::vector<std::string> words;
  bool inside = false;  // a word
  char quote = 0;
  for (const char c : text) {
    if (quote != 0 ? c == quote : c == '\'' || c == '"') {
      quote = quote == 0 ? c : 0;
      if (!std::exchange(inside, true)) words.emplace_back();
    } else if (quote == 0 && (c == ' ' || c == '\t' || c == '\n')) {
      inside = false;
    } else {
      if (!std::exchange(inside, true)) words.emplace_back();
      words.back() += c;
    }
  }
  if (quote != 0)
    throw InputError(str("run: a quote ", quote, " is not closed in ", excerpt(text)));
  if (words.empty()) throw InputError("needs a program to run; hint: run: \"python3 reward.py\"");
  return words;
}

}  // namespace cohort
