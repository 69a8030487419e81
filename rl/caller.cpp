#include "rl/caller.h"

#include <algorithm>
#include <utility>

#include "text/utf8.h"

namespace cohort {

void ProgramConfig::visit(ConfigVisitor& v) {
  v.field("run", run, "command: the program and its arguments; no shell is involved");
  v.field("directory", directory, "command: working directory; empty: the folder of this file");
  v.field("workers", workers, "command: processes per rank", {.min = 1, .max = 1024});
  v.field("timeout", timeout, "command: seconds without an answer until a process is restarted",
          {.min = 1e-3, .max = 1e6});
  v.field("start_timeout", start_timeout, "command: seconds for the first answer of a process",
          {.min = 1e-3, .max = 1e6});
  v.field("memory", memory, "command: MiB of address space of each process; 0: no limit",
          {.min = 0, .max = 1 << 30});
}

Caller::Caller(std::string name, const ProgramConfig& config, WorkerPoolOptions options,
               Requests requests)
    : name_(std::move(name)),
      callback_(config.callback),
      requests_(requests),
      options_(std::move(options)) {
  if (callback_ != nullptr) return;
  options_.program = {.command = split_command(config.run),
                      .directory = config.directory,
                      .memory = config.memory << 20};
  options_.workers = static_cast<int>(config.workers);
  options_.timeout = config.timeout;
  options_.start_timeout = std::max(config.timeout, config.start_timeout);
}

void Caller::submit(Json request, Key key) {
  if (callback_ != nullptr)  // as a program reads it: text that is not UTF-8 is replaced
    request = parse_json(request.dump(), "request");
  else if (pool_ == nullptr)
    pool_ = std::make_unique<WorkerPool>(process_spawner(), options_);
  if (callback_ != nullptr || requests_ == Requests::kLists)
    unsent_[key] = std::move(request);
  else
    pool_->submit(request.dump(), key);
}

void Caller::send_lists() {
  const auto count = static_cast<size_t>(options_.workers);
  auto next = unsent_.begin();
  for (size_t i = 0, sent = 0; i < count; ++i) {
    Json::Array list;
    std::vector<Key> keys;
    for (; sent < unsent_.size() * (i + 1) / count; ++sent, ++next) {
      keys.push_back(next->first);
      list.push_back(std::move(next->second));
    }
    if (list.empty()) continue;
    pool_->submit(Json(std::move(list)).dump(), {.index = std::ssize(lists_)});
    lists_.push_back(std::move(keys));
  }
  unsent_.clear();
}

std::vector<Caller::Answer> Caller::call() {
  std::vector<Answer> answers;
  Json::Array requests;
  for (auto& [key, request] : std::exchange(unsent_, {})) {
    requests.push_back(request);
    answers.push_back({.key = key, .request = request});
  }
  if (requests.empty()) return answers;
  std::vector<Json> values = (*callback_)(requests);
  if (values.size() != requests.size())
    throw InputError(str(name_, ": its function returned ", values.size(), " answers to ",
                         requests.size(), " requests; hint: one to each"));
  for (size_t i = 0; i < values.size(); ++i) answers[i].value = std::move(values[i]);
  return answers;
}

std::vector<Caller::Answer> Caller::parsed(const std::vector<WorkerPool::Answer>& answers) {
  std::vector<Answer> out;
  for (const auto& [line, error, key] : answers) {
    Json value = error.empty() ? parse_json(line, "its answer") : Json();
    if (requests_ == Requests::kSingle) {
      out.push_back({std::move(value), error, key});
      continue;
    }
    const std::vector<Key>& keys = lists_[static_cast<size_t>(key.index)];
    for (size_t i = 0; i < keys.size(); ++i)
      out.push_back({error.empty() ? value.as_array()[i] : Json(), error, keys[i]});
  }
  return out;
}

std::vector<Caller::Answer> Caller::collect() {
  if (callback_ != nullptr) return call();
  if (pool_ == nullptr) return {};
  send_lists();
  std::vector<Answer> answers = parsed(pool_->collect());
  lists_.clear();
  return answers;
}

std::vector<Caller::Answer> Caller::poll(bool wait) {
  if (callback_ != nullptr) return call();
  return pool_ == nullptr ? std::vector<Answer>() : parsed(pool_->poll(wait));
}

void Caller::cancel() {
  if (pool_ != nullptr) pool_->cancel();
  unsent_.clear();
}

std::vector<std::string> split_command(const std::string& text) {
  std::vector<std::string> words;
  bool in_word = false;
  char quote = 0;
  for (const char c : text) {
    const bool is_quote = quote != 0 ? c == quote : c == '\'' || c == '"';
    const bool is_blank = quote == 0 && (c == ' ' || c == '\t' || c == '\n');
    if (!is_blank && !in_word) words.emplace_back();
    in_word = !is_blank;
    if (is_quote)
      quote = quote == 0 ? c : 0;
    else if (!is_blank)
      words.back() += c;
  }
  if (quote != 0)
    throw InputError(str("run: a quote ", quote, " is not closed in ", excerpt(text)));
  if (words.empty()) throw InputError("needs a program to run; hint: run: \"python3 reward.py\"");
  return words;
}

}  // namespace cohort
