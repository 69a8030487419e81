// command: an environment that external programs play.
//
// A program reads requests from its standard input, one line of JSON per ended turn, and answers
// them on its standard output in any order, each with a line of JSON, which it must flush. Its
// standard error is appended to rewards.log in the run's directory. All turns of a dialogue go to
// the same program, which has up to 64 requests at a time.
//   request  {"index": 3, "step": 0, "turn": 1, "completion": "...", "messages": [...],
//             "tool_calls": [{"name": "...", "arguments": {...}, "id": "...", "error": "..."}],
//             "answer": "...", "fields": {...}, "prompt": "...", "length": 17}
//   answer   {"index": 3, "turn": 1, "observation": "..."}      or a list of texts, one per call
//        or  {"index": 3, "turn": 1, "messages": [{"role": "tool", "content": "..."}, ...]}
//        or  {"index": 3, "turn": 1, "done": true}              the dialogue ends
//        or  {"index": 3, "turn": 1, "error": "why the dialogue has failed"}
// `turn` counts from 1 within the dialogue, `index` the dialogues of a step. `completion` is the
// turn with its special tokens, without the one that ended it; `messages` is the whole dialogue up
// to this turn, and `length` its number of sampled tokens. `tool_calls` are those in `completion`,
// left out if no format is known; `id` and `error` (why it cannot be parsed) only where there is
// one. An observation is a message of the role tool if the turn has calls, else of the role user;
// `messages` may have both roles and further keys. Every answer may have a `reward` of the turn, a
// number. A program that breaks off, floods, answers a turn that it does not have, or answers
// nothing in `timeout` seconds is restarted, and its dialogues fail; any other invalid answer fails
// its own dialogue.
#include <algorithm>
#include <map>
#include <utility>

#include "core/text.h"
#include "rl/engine/rollout.h"
#include "rl/environments/environments.h"
#include "rl/rewards/command.h"
#include "rl/worker_pool.h"
#include "text/utf8.h"

namespace cohort {
namespace {

constexpr size_t kConcurrent = 64;  // also the default of scripts/cohort_environment.py

// A turn without its answer.
struct OpenTurn {
  Trajectory trajectory;  // only what observation_tokens() needs
  std::vector<ToolCall> calls;
};

WorkerPool::Key key_of(const std::string& line) {
  Json answer;
  try {
    answer = parse_json(line, "answer");
  } catch (const InputError&) {
    throw InputError("its answer is not valid JSON: " + excerpt(line));
  }
  const Json &index = answer.get_or_null("index"), &turn = answer.get_or_null("turn");
  if (!index.is_int() || !turn.is_int())
    throw InputError("its answer has no 'index' and 'turn': " + excerpt(line));
  return {index.as_int(), turn.as_int()};
}

WorkerPoolOptions pool_options(const EnvironmentConfig& config) {
  try {
    return {.program = {.command = split_command(config.run),
                        .directory = config.directory,
                        .memory = config.memory << 20},
            .workers = static_cast<int>(config.workers),
            .concurrent = kConcurrent,
            .timeout = config.timeout,
            .start_timeout = std::max(config.timeout, config.start_timeout),
            .validate = nullptr,
            .key_of = key_of};
  } catch (const InputError& e) {
    throw InputError(str("environment.run: ", e.what()));
  }
}

Json as_json(const std::vector<ToolCall>& calls) {
  Json out = Json::Array{};
  for (const ToolCall& call : calls) {
    Json one = Json().set("name", call.name).set("arguments", call.arguments);
    if (!call.id.empty()) one.set("id", call.id);
    if (!call.error.empty()) one.set("error", call.error);
    out.push_back(std::move(one));
  }
  return out;
}

// The answer to a call, or to all calls of a turn (nullptr).
Json tool_message(const std::string& content, const ToolCall* call) {
  Json message = make_message("tool", content);
  if (call != nullptr && !call->name.empty()) message.set("name", call->name);
  if (call != nullptr && !call->id.empty()) message.set("tool_call_id", call->id);
  return message;
}

// The messages of an `observation`.
Json observation_messages(const Json& observation, const std::vector<ToolCall>& calls) {
  if (observation.is_string()) {
    const std::string& text = observation.as_string();
    if (calls.empty()) return Json::Array{make_message("user", text)};
    return Json::Array{tool_message(text, calls.size() == 1 ? &calls[0] : nullptr)};
  }
  if (!observation.is_array() || calls.empty() || observation.as_array().size() != calls.size())
    throw InputError(str("its 'observation' is neither a text nor a list of ", calls.size(),
                         " texts, one per tool call"));
  Json messages;
  for (size_t i = 0; i < calls.size(); ++i) {
    const Json& text = observation.as_array()[i];
    if (!text.is_string()) throw InputError(str("its observation[", i, "] is not a text"));
    messages.push_back(tool_message(text.as_string(), &calls[i]));
  }
  return messages;
}

void check_messages(const Json& messages) {
  if (!messages.is_array() || messages.as_array().empty())
    throw InputError("its 'messages' is not a list of messages");
  for (const Json& message : messages.as_array())
    if ((!has_role(message, "tool") && !has_role(message, "user")) ||
        message.find_text("content") == nullptr)
      throw InputError(
          "its 'messages' has one without a role (tool or user) and a content, which is a text: " +
          excerpt(message.dump()));
}

// Throws InputError unless the answer has one of the kinds, and known keys otherwise.
void check_keys(const Json& answer) {
  const std::vector<std::string> keys{"observation", "messages", "done", "error",
                                      "reward",      "index",    "turn"};
  std::vector<std::string> kinds;
  for (const auto& [key, value] : answer.as_object()) {
    const auto at = std::ranges::find(keys, key) - keys.begin();
    if (at == std::ssize(keys))
      throw InputError(
          str("its answer has an unknown key ", excerpt(key), did_you_mean(key, keys)));
    if (at < 4) kinds.push_back(str("'", key, "'"));
  }
  if (kinds.empty())
    throw InputError("its answer has none of 'observation', 'messages', 'done' and 'error'");
  if (kinds.size() > 1) throw InputError("its answer has both " + join(kinds, " and "));
}

class CommandEnvironment : public Environment {
 public:
  CommandEnvironment(const EnvironmentConfig& config, EnvironmentContext context,
                     std::optional<ToolFormat> format)
      : context_(std::move(context)), format_(format), options_(pool_options(config)) {}

  void submit(const Example& example, const Trajectory& trajectory, int64_t step) override {
    if (pool_ == nullptr) pool_ = std::make_unique<WorkerPool>(worker_host(), options_);
    const std::string text = turn_text(context_.tokenizer, trajectory);
    Json messages = example.conversation;
    if (messages.is_null()) messages.push_back(make_message("user", example.prompt));
    if (!trajectory.transcript.is_null())
      for (const Json& message : trajectory.transcript.as_array()) messages.push_back(message);
    OpenTurn& open = open_[trajectory.index];
    open.trajectory.stop_reason = trajectory.stop_reason;
    if (format_) open.calls = parse_tool_calls(*format_, text);
    Json request;
    request.set("index", trajectory.index)
        .set("step", step)
        .set("turn", trajectory.num_turns())
        .set("completion", text)
        .set("messages", std::move(messages));
    if (format_) request.set("tool_calls", as_json(open.calls));
    request.set("answer", example.answer)
        .set("fields", example.fields)
        .set("prompt", example.prompt)
        .set("length", trajectory.completion_length());
    pool_->submit(request.dump(), {trajectory.index, trajectory.num_turns()});
  }

  std::vector<EnvironmentReply> poll(bool wait) override {
    std::vector<EnvironmentReply> replies;
    if (pool_ == nullptr) return replies;
    for (const WorkerPool::Answer& answer : pool_->poll(wait)) {
      const auto open = open_.extract(answer.key.index);
      EnvironmentReply& reply = replies.emplace_back();
      try {
        if (!answer.error.empty()) throw InputError(answer.error);
        reply = reply_to(open.mapped(), parse_json(answer.line, "answer"));
      } catch (const InputError& e) {
        reply.error = e.what();
      }
      reply.index = answer.key.index;
    }
    return replies;
  }

  void cancel_all() override {
    if (pool_ != nullptr) pool_->cancel();
    open_.clear();
  }

 private:
  // Throws InputError for an invalid answer, or if it reports an error.
  EnvironmentReply reply_to(const OpenTurn& turn, const Json& answer) const {
    check_keys(answer);
    EnvironmentReply reply;
    if (const Json& reward = answer.get_or_null("reward"); !reward.is_null()) {
      if (!reward.is_number()) throw InputError("its 'reward' is not a number");
      reply.reward = reward.as_double();  // finite: parse_json() accepts no other numbers
    }
    if (const Json* error = answer.find("error"))
      throw InputError(error->is_string() ? "it reports: " + excerpt(error->as_string(), 160, 80)
                                          : "its 'error' is not a text");
    if (const Json* done = answer.find("done")) {
      if (!done->is_bool() || !done->as_bool()) throw InputError("its 'done' is not true");
      reply.done = true;
      return reply;
    }
    if (const Json* observation = answer.find("observation")) {
      reply.messages = observation_messages(*observation, turn.calls);
    } else {
      reply.messages = answer.at("messages");
      check_messages(reply.messages);
    }
    reply.tokens = observation_tokens(context_, turn.trajectory, reply.messages);
    if (reply.tokens.empty()) throw InputError("its observation has no tokens");
    return reply;
  }

  const EnvironmentContext context_;
  const std::optional<ToolFormat> format_;
  const WorkerPoolOptions options_;
  std::map<int64_t, OpenTurn> open_;  // Trajectory::index -> its turn
  std::unique_ptr<WorkerPool> pool_;
};

}  // namespace

std::unique_ptr<Environment> make_command_environment(const EnvironmentConfig& config,
                                                      EnvironmentContext context,
                                                      std::optional<ToolFormat> format) {
  return std::make_unique<CommandEnvironment>(config, std::move(context), format);
}

}  // namespace cohort
