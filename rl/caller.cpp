#include "rl/caller.h"

#include <algorithm>
#include <utility>

#include "text/tokenizers/json_fields.h"
#include "text/utf8.h"

namespace cohort {

void ProgramConfig::visit(ConfigVisitor& v) {
  v.field("run", run,
          "command: the program and its arguments; no shell is involved. code: what a shell runs, "
          "where solutions are in another language");
  v.field("directory", directory, "command: working directory; empty: the folder of this file");
  v.field("workers", workers,
          "command, code, python: processes per rank; auto: one, of code and python one per core",
          {.min = 1, .max = 1024});
  v.field(
      "timeout", timeout,
      "command: seconds without an answer until a process is restarted (none: 10); code, python: "
      "seconds of a program (none: 10); http, judge: seconds for an answer (none: 60)",
      {.min = 1e-3, .max = 1e6});
  v.field("start_timeout", start_timeout, "command: seconds for the first answer of a process",
          {.min = 1e-3, .max = 1e6});
  v.field("memory", memory,
          "command, code, python: MiB of address space of each process; 0: no limit, of code 512",
          {.min = 0, .max = 1 << 30});
}

Caller::Caller(std::string name, const ProgramConfig& config, const ServerConfig& server,
               WorkerPoolOptions options)
    : name_(std::move(name)),
      callback_(config.callback),
      server_(server),
      options_(std::move(options)) {
  if (callback_ != nullptr) return;
  options_.timeout = config.timeout.value_or(server.url.empty() ? 10 : 60);
  if (!server.url.empty()) {
    ProcessSpawner::hide_variables(server.variables());
    return;
  }
  options_.program = {split_command(config.run), config.directory, config.memory << 20};
  options_.workers = static_cast<int>(config.workers.value_or(1));
  options_.start_timeout = std::max(options_.timeout, config.start_timeout);
}

void Caller::start() {
  if (callback_ != nullptr || pool_ != nullptr) return;
  pool_ = with_path(name_, [&] {
    return server_.url.empty()
               ? make_worker_pool(process_spawner(), options_)
               : make_http_pool({name_, server_, static_cast<int64_t>(options_.concurrent),
                                 options_.timeout, options_.validate});
  });
}

void Caller::submit(const Json& request, Key key) {
  const std::string line = request.dump();
  // A callback reads what a program would: text that is not UTF-8 is replaced.
  if (callback_ != nullptr) {
    unsent_[key] = parse_json(line, "request");
    return;
  }
  start();
  pool_->submit(line, key);
}

std::vector<Caller::Answer> Caller::take(RequestPool::Wait wait) {
  std::vector<Answer> out;
  if (pool_ != nullptr)
    for (const auto& [line, error, key] : pool_->take(wait)) {
      Answer& answer = out.emplace_back(Json(), error, key);
      if (error.empty()) try {
          answer.value = parse_json(line, "its answer");
        } catch (const InputError& e) {
          answer.error = e.what();
        }
    }
  Json::Array requests;
  for (auto& [key, request] : std::exchange(unsent_, {})) {
    requests.push_back(std::move(request));
    out.push_back({.key = key});
  }
  if (requests.empty()) return out;
  std::vector<Json> values = (*callback_)(requests);
  if (values.size() != requests.size())
    throw InputError(str(name_, ": its function returned ", values.size(), " answers to ",
                         requests.size(), " requests; hint: one to each"));
  for (size_t i = 0; i < values.size(); ++i) out[i].value = std::move(values[i]);
  return out;
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
  if (words.empty())
    throw InputError(
        "needs a program to run; hint: run: \"python3 PATH/TO/cohort/scripts/cohort_reward.py "
        "FILE.py\" for a function, or a program of the protocol of docs/rewards.md");
  return words;
}

}  // namespace cohort
