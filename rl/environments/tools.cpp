// tools: the policy calls built-in tools, and observes their results. A turn without a call ends
// the dialogue. A call that is wrong has an answer that says so, beginning with "error: ".
#include <algorithm>
#include <charconv>
#include <utility>

#include "core/text.h"
#include "rl/environments/environments.h"
#include "rl/environments/search.h"
#include "rl/rewards/expression.h"
#include "text/utf8.h"

namespace cohort {
namespace {

constexpr size_t kMaxTextBytes = 1000;  // each text that a search finds is cut there

// A built-in tool. Each has one argument, a text.
struct Tool {
  const char *name, *description, *argument, *meaning;
};
constexpr Tool kTools[] = {
    {"calculator", "Calculates the exact value of an expression of numbers.", "expression",
     "numbers with + - * / ^ ! and parentheses, such as (37+58)*41"},
    {"search", "Searches a collection of texts and returns the ones that match best.", "query",
     "words to look for"},
};

const Tool* find_tool(const std::string& name) {
  for (const Tool& tool : kTools)
    if (name == tool.name) return &tool;
  return nullptr;
}

std::string digits_of(Rational::Wide number) {
  std::string digits;
  do digits.insert(digits.begin(), static_cast<char>('0' + static_cast<int>(number % 10)));
  while ((number /= 10) != 0);
  return digits;
}

// All digits of a number that has at most 12 after the point, 10 significant ones of any other.
std::string number_text(const Number& number) {
  constexpr Rational::Wide kScale = 1'000'000'000'000;  // 10^12
  if (number.exact && kScale % number.exact->den == 0) {
    const auto [num, den, negative] = *number.exact;
    std::string text = str(negative ? "-" : "", digits_of(num / den));
    if (den == 1) return text;
    const std::string decimals = digits_of(kScale + num % den * (kScale / den));
    return str(text, ".", decimals.substr(1, decimals.find_last_not_of('0')));
  }
  char text[32];
  const auto end =
      std::to_chars(text, std::end(text), number.approx, std::chars_format::general, 10).ptr;
  return {text, end};
}

std::string calculate(const std::string& expression) {
  bool too_large = false;
  const auto value = expression_value(expression, &too_large);
  const bool is_equation = expression.find('=') != expression.npos;
  if (value && !too_large && !is_equation) return number_text(*value);
  return str("error: ", excerpt(expression),
             is_equation ? " is an equation, not an expression"
             : too_large ? " is too large for exact arithmetic"
                         : " is no expression with a value");
}

std::string numbered(const std::vector<std::string>& texts) {
  if (texts.empty()) return "error: no document matches";
  std::string result;
  for (size_t i = 0; i < texts.size(); ++i) {
    const std::string& text = texts[i];
    const size_t size =
        text.size() <= kMaxTextBytes ? text.size() : last_utf8_begin(text, kMaxTextBytes + 1);
    result += str(i == 0 ? "" : "\n", i + 1, ". ", text.substr(0, size));
  }
  return result;
}

// The answer to a call with wrong arguments; empty: they are right.
std::string argument_error(const Tool& tool, const Json& arguments) {
  const std::string error = str("error: ", tool.name, ": ");
  const std::string hint = str("; it takes {\"", tool.argument, "\": text}");
  for (const auto& [name, value] : arguments.as_object())
    if (name != tool.argument) return str(error, "unknown argument ", excerpt(name), hint);
  const Json* argument = arguments.find(tool.argument);
  if (argument == nullptr) return str(error, "no argument '", tool.argument, "'", hint);
  return argument->is_string() ? "" : str(error, "'", tool.argument, "' is no text", hint);
}

class ToolsEnvironment final : public Environment {
 public:
  ToolsEnvironment(const EnvironmentConfig& config, EnvironmentContext context, ToolFormat format)
      : config_(config),
        context_(std::move(context)),
        format_(format),
        tools_(tools_environment_schemas(config)) {
    if (format == ToolFormat::kInline) context_.tokenizer.encode("0123456789");  // must have them
    if (!config.corpus.empty())
      search_ = std::make_unique<TextSearch>(config.corpus, config.corpus_field);
  }

  std::vector<std::string> stop_strings() const override {
    return format_ == ToolFormat::kInline ? std::vector<std::string>{">>"}
                                          : std::vector<std::string>{};
  }

  void submit(const Example& example, const Trajectory& trajectory, int64_t) override {
    EnvironmentReply reply{.index = trajectory.index};
    const std::vector<ToolCall> calls =
        calls_of_turn(format_, context_.tokenizer, example, trajectory, tools_);
    reply.done = calls.empty();
    if (!reply.done) answer(calls, example, trajectory, reply);
    replies_.push_back(std::move(reply));
  }

  std::vector<EnvironmentReply> poll(bool) override { return std::exchange(replies_, {}); }
  void cancel_all() override { replies_.clear(); }

 private:
  void answer(const std::vector<ToolCall>& calls, const Example& example,
              const Trajectory& trajectory, EnvironmentReply& reply) const {
    try {
      for (const ToolCall& call : calls) {
        Json message = make_message("tool", result_of(call));
        message.set("name", call.name);
        if (!call.id.empty()) message.set("tool_call_id", call.id);
        reply.messages.push_back(std::move(message));
      }
      const EnvironmentContext& context = format_ == ToolFormat::kInline ? plain_ : context_;
      reply.tokens =
          observation_tokens(context, reply.messages, has_end_of_turn(context, trajectory),
                             example.template_variables);
    } catch (const InputError& e) {
      // The characters of a task need not suffice for the text of an error: such a call is the end.
      if (format_ == ToolFormat::kInline)
        reply = {.index = reply.index, .done = true};
      else
        reply.error = e.what();
    }
  }

  std::string result_of(const ToolCall& call) const {
    if (!call.error.empty()) return str("error: ", call.error);
    const Tool* tool = find_tool(call.name);
    if (std::ranges::find(config_.tools, call.name) == config_.tools.end())
      return str("error: unknown tool ", excerpt(call.name),
                 "; known: ", join(config_.tools, ", "));
    std::string error = argument_error(*tool, call.arguments);
    if (!error.empty()) return error;
    const std::string& argument = call.arguments.at(tool->argument).as_string();
    return search_ != nullptr && tool->name == std::string_view("search")
               ? numbered(search_->find(argument, config_.search_results))
               : calculate(argument);
  }

  const EnvironmentConfig config_;
  const EnvironmentContext context_;
  // Results of inline calls continue the turn as plain text, whatever the chat format is.
  const EnvironmentContext plain_{context_.tokenizer, {}};
  const ToolFormat format_;
  const Json tools_;
  std::unique_ptr<TextSearch> search_;
  std::vector<EnvironmentReply> replies_;
};

}  // namespace

Json tools_environment_schemas(const EnvironmentConfig& config) {
  std::vector<std::string> known;
  for (const Tool& tool : kTools) known.emplace_back(tool.name);
  if (config.tools.empty())
    throw InputError(str("environment.tools: is empty; hint: known: ", join(known, ", ")));
  const auto count = [&](const std::string& name) {
    return std::ranges::count(config.tools, name);
  };
  Json schemas = Json::Array{};
  for (const std::string& name : config.tools) {
    const Tool* tool = find_tool(name);
    if (tool == nullptr)
      throw InputError(str("environment.tools: unknown tool '", name,
                           "'; known: ", join(known, ", "), did_you_mean(name, known)));
    if (count(name) > 1) throw InputError(str("environment.tools: '", name, "' is there twice"));
    const Json argument = Json().set("type", "string").set("description", tool->meaning);
    Json parameters, function;
    parameters.set("type", "object").set("properties", Json().set(tool->argument, argument));
    parameters.set("required", Json::Array{tool->argument});
    function.set("name", name).set("description", tool->description);
    function.set("parameters", std::move(parameters));
    schemas.push_back(Json().set("type", "function").set("function", function));
  }
  if (count("search") != !config.corpus.empty())
    throw InputError(config.corpus.empty()
                         ? "environment.corpus: the tool search needs it; hint: corpus: FILE.jsonl"
                         : "environment.corpus: only the tool search takes it");
  if (config.tool_format == ToolFormat::kInline && count("calculator") == 0)
    throw InputError("environment.tools: tool_format: inline needs the calculator");
  return schemas;
}

std::unique_ptr<Environment> make_tools_environment(const EnvironmentConfig& config,
                                                    EnvironmentContext context, ToolFormat format) {
  return std::make_unique<ToolsEnvironment>(config, std::move(context), format);
}

}  // namespace cohort
