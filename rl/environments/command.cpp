// command, http: an environment that external programs play, or in their place a server, which gets
// each request as the body of a POST, or a callback. The answers of these need no `index` and
// `turn`. A server may get a turn again whose answer was lost.
//
// A program reads requests from its standard input, one line of JSON per ended turn, and answers
// them on its standard output in any order, each with a line of JSON, which it must flush. Its
// standard error is appended to workers.log in the run's directory. All turns of a dialogue go to
// the same program, which has up to `concurrent` requests at a time.
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
//
// With `starts: yes` the environment is also asked how the dialogues of a prompt begin, before they
// are sampled: in a request whose `turn` is 0, and whose `index` is that of the first of them.
//   answer   {"index": 0, "turn": 0, "messages": [{"role": "user", ...}], "fields": {...}}
//        or  {"index": 0, "turn": 0, "observation": "...", "fields": {...}}    a user's message
//        or  {"index": 0, "turn": 0, "error": "why the dialogues have failed"}
// The messages, which may be left out, follow the prompt; the fields, which also may, are added to
// those of the line, `answer`, a text or a list of right ones, in place of its answer.
#include <cmath>
#include <map>
#include <utility>

#include "rl/caller.h"
#include "rl/engine/rollout.h"
#include "rl/environments/environments.h"
#include "text/tokenizers/json_fields.h"
#include "text/utf8.h"

namespace cohort {
namespace {

// A turn without its answer.
struct OpenTurn {
  bool begins = false;  // the beginning of a prompt's dialogues
  bool has_end = true;  // as observation_tokens() takes it
  std::vector<ToolCall> calls;
  Json template_variables;
};

Caller::Key key_of(const std::string& line) {
  const Json answer = parse_json(line, "its answer");
  return with_location(answer, "its answer", [&]() -> Caller::Key {
    return {answer.at("index").as_int(), answer.at("turn").as_int()};
  });
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

// The messages of an `observation`, which is a text or a list of one text per call.
Json observation_messages(const Json& observation, const std::vector<ToolCall>& calls) {
  if (observation.is_string() && calls.size() != 1)
    return Json::Array{make_message(calls.empty() ? "user" : "tool", observation.as_string())};
  if (!observation.is_string() && (calls.empty() || observation.as_array().size() != calls.size()))
    throw InputError(str("its observation has ", observation.as_array().size(), " texts for ",
                         calls.size(), " tool calls"));
  Json messages = Json::Array{};
  for (size_t i = 0; i < calls.size(); ++i) {
    const Json& text = observation.is_string() ? observation : observation.as_array()[i];
    Json message = make_message("tool", text.as_string());
    if (!calls[i].name.empty()) message.set("name", calls[i].name);
    if (!calls[i].id.empty()) message.set("tool_call_id", calls[i].id);
    messages.push_back(std::move(message));
  }
  return messages;
}

// Messages that begin a dialogue may have any role, and may be missing.
Json checked_messages(const Json& messages, bool begins) {
  if (messages.as_array().empty() && begins) return {};
  if (messages.as_array().empty()) throw InputError("its answer has no messages");
  for (const Json& message : messages.as_array()) {
    message.at("content").as_string();
    const std::string& role = message.at("role").as_string();
    if (!begins && role != "tool" && role != "user")
      throw InputError(
          str("its answer has a message of the role ", excerpt(role), "; hint: tool or user"));
  }
  return messages;
}

// Throws InputError for an invalid answer, or if it reports an error. Without tokens.
EnvironmentReply parse_reply(const OpenTurn& turn, const Json& answer) {
  EnvironmentReply reply;
  int kinds = 0;
  for (const auto& [key, value] : answer.as_object()) {
    if (key == "index" || key == "turn") continue;
    const bool is_reward = key == "reward" && !turn.begins;
    kinds += !is_reward;
    if (key == "error") throw InputError("it reports: " + excerpt(value.as_string(), 160, 80));
    if (key == "observation")
      reply.messages = observation_messages(value, turn.calls);
    else if (key == "messages")
      reply.messages = checked_messages(value, turn.begins);
    else if (key == "fields" && turn.begins)
      reply.fields = value.as_object();
    else if (key == "done" && !turn.begins)
      reply.done = value.as_bool();
    else if (!is_reward)
      throw InputError(
          str("its answer", turn.begins ? " to turn 0" : "", " has an unknown key ", excerpt(key)));
    else if (!value.is_null() && std::isfinite(value.as_double()))
      reply.reward = value.as_double();
  }
  if (!turn.begins && (kinds != 1 || (reply.messages.is_null() && !reply.done)))
    throw InputError(
        "its answer needs exactly one of 'observation', 'messages', 'done': true, and 'error'");
  return reply;
}

class CommandEnvironment : public Environment {
 public:
  CommandEnvironment(const EnvironmentConfig& config, EnvironmentContext context,
                     std::optional<ToolFormat> format)
      : context_(std::move(context)),
        format_(format),
        tools_(tool_schemas(config)),
        is_callback_(config.program.callback != nullptr),
        starts_(config.starts),
        caller_("environment", config.program, config.server,
                {.concurrent = static_cast<size_t>(config.concurrent), .key_of = key_of}) {}

  bool starts() const override { return starts_; }

  Example started(const Example& example, const EnvironmentReply& reply) const override {
    Example out = example;
    for (const auto& [key, value] : reply.fields.as_object()) out.fields.set(key, value);
    if (const Json* answer = reply.fields.find("answer")) {
      std::vector<std::string> answers;
      for (const Json& one : answer->is_array() ? answer->as_array() : Json::Array{*answer})
        if (!one.is_null()) answers.push_back(one.to_text());
      if (answers.empty()) answers.emplace_back();
      out.answer = out.solution = answers[0];
      out.other_answers.assign(answers.begin() + 1, answers.end());
    }
    if (reply.messages.is_null()) return out;
    out.prompt_tokens.clear();
    for (const Json& message : reply.messages.as_array()) {
      if (context_.chat)
        out.conversation.push_back(message);
      else
        out.prompt += message.at("content").as_string();
    }
    if (context_.chat)
      out.prompt = context_.chat->with(out.template_variables).prompt(out.conversation);
    out.prompt_tokens = encode_prompt(out, context_.tokenizer);
    return out;
  }

  void submit(const Example& example, const Trajectory& trajectory, int64_t step) override {
    const bool begins = trajectory.tokens.empty();
    const std::string text = begins ? "" : turn_text(context_.tokenizer, trajectory);
    Json messages = example.conversation;
    if (messages.is_null()) messages.push_back(make_message("user", example.prompt));
    if (!trajectory.transcript.is_null())
      for (const Json& message : trajectory.transcript.as_array()) messages.push_back(message);
    OpenTurn& open = open_[trajectory.index];
    open.begins = begins;
    open.has_end = begins || has_end_of_turn(context_, trajectory);
    open.template_variables = example.template_variables;
    if (format_ && !begins)
      open.calls = calls_of_turn(*format_, context_.tokenizer, example, trajectory, tools_);
    Json request;
    request.set("index", trajectory.index)
        .set("step", step)
        .set("turn", trajectory.num_turns())
        .set("completion", text)
        .set("messages", std::move(messages));
    if (format_ && !begins) request.set("tool_calls", as_json(open.calls));
    request.set("answer", example.answer)
        .set("fields", example.fields)
        .set("prompt", example.prompt)
        .set("length", trajectory.completion_length());
    caller_.submit(request, {trajectory.index, trajectory.num_turns()});
  }

  std::vector<EnvironmentReply> poll(bool wait) override {
    std::vector<EnvironmentReply> replies;
    for (const Caller::Answer& answer :
         caller_.take(wait ? RequestPool::Wait::kOne : RequestPool::Wait::kNone)) {
      const auto open = open_.extract(answer.key.index);
      EnvironmentReply& reply = replies.emplace_back();
      try {
        if (!answer.error.empty()) throw InputError(answer.error);
        // The text of a callback may not be valid UTF-8, as a program's is.
        reply = reply_to(open.mapped(), is_callback_ ? parse_json(answer.value.dump(), "its answer")
                                                     : answer.value);
      } catch (const InputError& e) {
        reply.error = e.what();
      }
      reply.index = answer.key.index;
      if (open.mapped().begins && reply.fields.is_null()) reply.fields = Json::Object{};
    }
    return replies;
  }

  void cancel_all() override {
    caller_.cancel();
    open_.clear();
  }

 private:
  EnvironmentReply reply_to(const OpenTurn& turn, const Json& answer) const {
    EnvironmentReply reply =
        with_location(answer, "its answer", [&] { return parse_reply(turn, answer); });
    if (reply.done || turn.begins) return reply;
    reply.tokens =
        observation_tokens(context_, reply.messages, turn.has_end, turn.template_variables);
    if (reply.tokens.empty()) throw InputError("its observation has no tokens");
    return reply;
  }

  const EnvironmentContext context_;
  const std::optional<ToolFormat> format_;
  const Json tools_;  // as calls_of_turn() takes them
  const bool is_callback_, starts_;
  Caller caller_;
  std::map<int64_t, OpenTurn> open_;  // Trajectory::index -> its turn
};

}  // namespace

std::unique_ptr<Environment> make_command_environment(const EnvironmentConfig& config,
                                                      EnvironmentContext context,
                                                      std::optional<ToolFormat> format) {
  return with_path("environment", [&] {
    return std::make_unique<CommandEnvironment>(config, std::move(context), format);
  });
}

}  // namespace cohort
