#include "rl/rewards/command.h"

#include <cmath>
#include <map>
#include <utility>

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

CommandReward::Result result_of(const Json& answer) {
  if (const Json* error = answer.find("error"))
    return {kNotApplicable, "it reports: " + excerpt(error->as_string())};
  const Json& reward = answer.at("reward");
  return {reward.is_null() ? kNotApplicable : reward.as_double(), ""};
}

}  // namespace

CommandReward::CommandReward(const RewardConfig& config) : config_(config) {
  if (config.function == nullptr) options_ = worker_options(config);
  options_.validate = validate_answer;
}

bool CommandReward::runs(const RewardConfig& config) const {
  RewardConfig same = config;
  same.weight = config_.weight;
  return same == config_;
}

void CommandReward::submit(const RewardInput& in) {
  if (pool_ == nullptr && config_.function == nullptr)
    pool_ = std::make_unique<WorkerPool>(worker_host(), options_);
  if (!submitted_.insert(in.index).second) return;
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
  if (config_.function != nullptr)  // as a program reads it: text that is not UTF-8 is replaced
    request = parse_json(request.dump(), "request");
  if (config_.batch || config_.function != nullptr) return unsent_.push_back(std::move(request));
  requested_.push_back({in.index});
  pool_->submit(request.dump());
}

// Sends one list to each program.
void CommandReward::flush() {
  const auto lists = static_cast<size_t>(options_.workers);
  for (size_t i = 0; i < lists; ++i) {
    const auto boundary = [&](size_t index) {
      return unsent_.begin() + static_cast<std::ptrdiff_t>(unsent_.size() * index / lists);
    };
    const Json::Array list(boundary(i), boundary(i + 1));
    if (list.empty()) continue;
    for (std::vector<int64_t>& indices = requested_.emplace_back(); const Json& request : list)
      indices.push_back(request.at("index").as_int());
    pool_->submit(Json(list).dump());
  }
  unsent_.clear();
}

// Completions are submitted as they end, so they are sorted.
std::map<int64_t, CommandReward::Result> CommandReward::call_function() {
  submitted_.clear();
  Json::Array requests = std::exchange(unsent_, {});
  if (requests.empty()) return {};
  std::ranges::sort(requests, {}, [](const Json& r) { return r.at("index").as_int(); });
  const std::vector<std::optional<double>> values = (*config_.function)(requests);
  if (values.size() != requests.size())
    throw InputError(str("reward ", config_.name, ": its function returned ", values.size(),
                         " values for ", requests.size(), " completions; hint: one for each"));
  std::map<int64_t, Result> out;
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] && !std::isfinite(*values[i]))
      throw InputError(str("reward ", config_.name, ": its function returned ", *values[i],
                           " for completion ", i, ", ",
                           excerpt(requests[i].at("completion").as_string()),
                           "; hint: a finite number, or none where it does not apply"));
    out[requests[i].at("index").as_int()] = {values[i].value_or(kNotApplicable), ""};
  }
  return out;
}

std::map<int64_t, CommandReward::Result> CommandReward::collect() {
  if (config_.function != nullptr) return call_function();
  if (pool_ == nullptr) return {};
  flush();
  std::map<int64_t, Result> out;
  const std::vector<WorkerPool::Answer> answers = pool_->collect();
  for (size_t i = 0; i < answers.size(); ++i) {
    const auto& [line, error, key] = answers[i];
    const Json answer = error.empty() ? parse_json(line, "answer") : Json();
    for (size_t k = 0; k < requested_[i].size(); ++k)
      out[requested_[i][k]] = !error.empty()  ? Result{kNotApplicable, error}
                              : config_.batch ? result_of(answer.as_array()[k])
                                              : result_of(answer);
  }
  requested_.clear();
  submitted_.clear();
  return out;
}

// A program is no function of one completion: RewardSet submits to it and collects from it.
RewardFn make_command(const RewardConfig&, const Task*) {
  return nullptr;
}

std::vector<std::string> split_command(const std::string& text) {
  std::vector<std::string> words;
  bool in_word = false;
  char quote = 0;
  for (const char c : text) {
    if (quote != 0 ? c == quote : c == '\'' || c == '"') {
      quote = quote == 0 ? c : 0;
      if (!std::exchange(in_word, true)) words.emplace_back();
    } else if (quote == 0 && (c == ' ' || c == '\t' || c == '\n')) {
      in_word = false;
    } else {
      if (!std::exchange(in_word, true)) words.emplace_back();
      words.back() += c;
    }
  }
  if (quote != 0)
    throw InputError(str("run: a quote ", quote, " is not closed in ", excerpt(text)));
  if (words.empty()) throw InputError("needs a program to run; hint: run: \"python3 reward.py\"");
  return words;
}

}  // namespace cohort
