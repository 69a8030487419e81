#include "rl/environment.h"

#include <algorithm>

#include "core/text.h"
#include "data/chat_examples.h"
#include "rl/engine/rollout.h"
#include "rl/environments/environments.h"
#include "rl/reward.h"
#include "sys/files.h"
#include "text/utf8.h"

namespace cohort {
namespace {

constexpr int64_t kMaxSchemaBytes = 4 << 20;

struct EnvironmentEntry {
  const char* name;
  const char* keys;  // that it takes besides kCommonKeys, separated by blanks
};
constexpr const char* kCommonKeys = "name max_turns max_sequence_length discount turns tool_format";
constexpr EnvironmentEntry kEnvironments[] = {
    {"tools", "tools corpus corpus_field search_results sandbox workers timeout memory"},
    {"http",
     "url headers_env ca_file proxy concurrent timeout retries outage_minutes tool_schemas starts"},
    {"command",
     "run directory tool_schemas starts workers concurrent memory timeout start_timeout"},
};

const char* keys_of(const std::string& name) {
  for (const EnvironmentEntry& entry : kEnvironments)
    if (name == entry.name) return entry.keys;
  return "tool_schemas starts";  // a function
}

void check_known(const EnvironmentConfig& config) {
  const std::vector<std::string> names = environment_names();
  if (config.program.callback == nullptr && std::ranges::find(names, config.name) == names.end())
    throw InputError(str("environment.name: unknown environment '", config.name,
                         "'; known: ", join(names, ", "), did_you_mean(config.name, names)));
}

EnvironmentContext context_of(const DataConfig& data, const Tokenizer& tokenizer) {
  EnvironmentContext context{tokenizer, {}};
  if (data.is_chat()) context.chat = chat_format(data, tokenizer);
  return context;
}

std::string changed_turns(const EnvironmentContext& context) {
  std::string roles;
  for (const char* role : {"tool", "user"})
    if (context.chat && !context.chat->keeps_turns(role))
      roles += str(roles.empty() ? "" : " or ", role);
  if (roles.empty()) return "";
  return str("the chat template renders a turn otherwise once a message of the role ", roles,
             " follows");
}

}  // namespace

std::vector<std::string> environment_names() {
  std::vector<std::string> names;
  for (const EnvironmentEntry& entry : kEnvironments) names.emplace_back(entry.name);
  return names;
}

void EnvironmentConfig::visit(ConfigVisitor& v) {
  v.field("name", name,
          "tools: built-in tools; command: a program; http: a server; empty: completions have one "
          "turn");
  v.field("max_turns", max_turns, "turns of the policy; a dialogue that needs more is truncated",
          {.min = 1, .max = 1 << 16});
  v.field("max_sequence_length", max_sequence_length,
          "tokens of a prompt with all its turns and observations; 0: the model's context",
          {.min = 0, .max = 1 << 24});
  v.field("discount", discount, "the reward of turn t counts discount^(t - 1)",
          {.min = 0, .max = 1});
  v.choice("turns", turns, kPastTurns,
           "earlier turns that the chat template would change: as_sampled: stay as they were "
           "sampled; strict: such templates are an error");
  v.choice("tool_format", tool_format, kToolFormats,
           "how the policy writes tool calls; auto: as the chat template does; inline: "
           "<<EXPRESSION>> is a call of the calculator");
  v.field("tools", tools, "tools: names of built-in tools: calculator, python, search");
  v.field("corpus", corpus, "search: JSON lines to look in");
  v.field("corpus_field", corpus_field, "search: their field with the text");
  v.field("search_results", search_results, "search: texts that a call returns",
          {.min = 1, .max = 100});
  visit_sandbox(v, sandbox);
  program.visit(v);
  server.visit(v);
  v.field("tool_schemas", tool_schemas,
          "command, http: a JSON file with the list of tools that the chat template shows; empty: "
          "none");
  v.field(
      "starts", starts,
      "command, http: it begins the dialogues of each prompt, with messages after the prompt and "
      "further fields of the line");
  v.field(
      "concurrent", concurrent,
      "command, http: turns that a process or the server has at a time; 1: it answers one after "
      "the other",
      {.min = 1, .max = 1 << 16});
}

bool EnvironmentConfig::has_program() const {
  return !program.run.empty() || std::ranges::find(tools, "python") != tools.end();
}

void EnvironmentConfig::validate() const {
  const EnvironmentConfig initial;
  if (!is_set()) {
    if (*this != initial)
      throw InputError(str("environment: keys are given without a name; hint: name: ",
                           program.run.empty() ? "tools" : "command"));
    return;
  }
  const std::string taken = str(kCommonKeys, " ", keys_of(name));
  const ConfigFields given = config_fields(*this), defaults = config_fields(initial);
  for (size_t i = 0; i < given.size(); ++i)
    if (given[i] != defaults[i] && !has_word(taken, given[i].first)) {
      check_known(*this);
      throw InputError(str("environment.", given[i].first, ": '", name,
                           "' does not take it; hint: it takes ", taken));
    }
  if (name == "command" && program.run.empty())
    throw InputError(
        "environment.run: needs a program; hint: run: \"python3 "
        "PATH/TO/cohort/scripts/cohort_environment.py tools.py\"");
  if (name == "http") try {
      server.validate();
    } catch (const InputError& e) {
      throw InputError(str("environment.", e.what()));
    }
  if (name == "tools") tools_environment_schemas(*this);
}

Json tool_schemas(const EnvironmentConfig& config) {
  if (config.name == "tools") return tools_environment_schemas(config);
  if (config.tool_schemas.empty()) return {};
  Json schemas = parse_json(read_text_file(config.tool_schemas, kMaxSchemaBytes),
                            "environment.tool_schemas: " + config.tool_schemas);
  if (!schemas.is_array())
    throw InputError(str("environment.tool_schemas: ", config.tool_schemas,
                         ": expected a list of tools, as chat templates take it"));
  return schemas;
}

std::unique_ptr<Environment> make_environment(const EnvironmentConfig& config,
                                              EnvironmentContext context) {
  if (!config.is_set()) return nullptr;
  check_known(config);
  config.validate();
  std::optional<ToolFormat> format = config.tool_format;
  if (format == ToolFormat::kAuto)
    format = context.chat ? tool_format_of(*context.chat) : std::nullopt;
  const bool has_tools = config.name == "tools" || !config.tool_schemas.empty();
  if (has_tools && !format)
    throw InputError(str("environment.tool_format: ",
                         context.chat ? "the chat template writes tool calls in no known format"
                                      : "prompts are plain text, whose tool calls have no format",
                         "; hint: tool_format: hermes with the format in data.system, or inline"));
  if (config.turns == PastTurns::kStrict)
    if (const std::string changed = changed_turns(context); !changed.empty())
      throw InputError(str("environment.turns: strict: ", changed,
                           "; hint: turns: as_sampled keeps their tokens"));
  if (config.name == "tools") return make_tools_environment(config, std::move(context), *format);
  return make_command_environment(config, std::move(context), format);
}

std::unique_ptr<Environment> environment_of(const EnvironmentConfig& config, const DataConfig& data,
                                            const Tokenizer& tokenizer) {
  return config.is_set() ? make_environment(config, context_of(data, tokenizer)) : nullptr;
}

std::string changed_turns(const EnvironmentConfig& config, const DataConfig& data,
                          const Tokenizer& tokenizer) {
  return config.is_set() ? changed_turns(context_of(data, tokenizer)) : "";
}

DialogueOptions dialogue_options(const EnvironmentConfig& config, Environment* environment) {
  return {.environment = environment,
          .max_turns = config.max_turns,
          .max_sequence_length = config.max_sequence_length,
          .discount = config.discount};
}

bool has_end_of_turn(const EnvironmentContext& context, const Trajectory& trajectory) {
  if (trajectory.stop_reason == StopReason::kStopToken || !context.chat) return true;
  const ChatFormat::EndOfTurn end = context.chat->end_of_turn(context.tokenizer);
  return !end.token && trajectory.text.ends_with(end.text);
}

std::vector<ToolCall> calls_of_turn(ToolFormat format, const Tokenizer& tokenizer,
                                    const Example& example, const Trajectory& trajectory,
                                    const Json& tools) {
  const std::span<const int32_t> all = trajectory.tokens;
  const std::string before =
      tokenizer.decode(all.first(all.size() - trajectory.last_turn().size()), SpecialText::kShow);
  const Json* own = example.template_variables.find("tools");
  return parse_tool_calls(format, str(opened_thinking(before), turn_text(tokenizer, trajectory)),
                          own == nullptr ? tools : *own);
}

std::vector<int32_t> observation_tokens(const EnvironmentContext& context, const Json& messages,
                                        bool has_end, const Json& variables) {
  std::vector<ChatFormat::Piece> pieces;
  if (context.chat)
    pieces = context.chat->with(variables).continuation(context.tokenizer, messages, !has_end);
  else
    for (const Json& message : messages.as_array())
      pieces.push_back({message.at("content").as_string(), true});
  return encode_pieces(context.tokenizer, pieces);
}

}  // namespace cohort
