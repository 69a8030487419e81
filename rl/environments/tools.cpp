// tools: the policy calls built-in tools, and observes their results. A turn without a call ends
// the dialogue. A call that is wrong has an answer that says so, beginning with "error: ".
#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <utility>

#include "core/text.h"
#include "rl/environments/environments.h"
#include "rl/environments/search.h"
#include "rl/rewards/expression.h"
#include "rl/rewards/rewards.h"
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
    {"python", "Runs a Python program and returns what it prints.", "code",
     "a whole program; nothing is kept between calls"},
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
    if (format == ToolFormat::kInline) {
      context_.tokenizer.encode("0123456789");  // must have them
      context_.chat.reset();                    // results continue the turn as plain text
    }
    if (config.has_program()) start_python();
    if (!config.corpus.empty())
      search_ = std::make_unique<TextSearch>(config.corpus, config.corpus_field);
  }

  std::vector<std::string> stop_strings() const override {
    return format_ == ToolFormat::kInline ? std::vector<std::string>{">>"}
                                          : std::vector<std::string>{};
  }

  void submit(const Example& example, const Trajectory& trajectory, int64_t) override {
    Turn& turn = turns_[trajectory.index];
    turn = {.calls = calls_of_turn(format_, context_.tokenizer, example, trajectory, tools_),
            .template_variables = example.template_variables};
    turn.has_end = !turn.calls.empty() && has_end_of_turn(context_, trajectory);
    for (const ToolCall& call : turn.calls) {
      const int64_t i = std::ssize(turn.results);
      if (turn.results.emplace_back(result_of(call))) continue;
      ++turn.num_unanswered;
      python_->submit(Json().set("index", i).set("code", call.arguments.at("code")),
                      {trajectory.index, i});
    }
    if (turn.num_unanswered == 0) finish(trajectory.index);
  }

  std::vector<EnvironmentReply> poll(bool wait) override {
    do take_outputs(wait && replies_.empty());
    while (wait && replies_.empty() && !turns_.empty());
    return std::exchange(replies_, {});
  }
  void cancel_all() override {
    if (python_) python_->cancel();
    turns_.clear();
    replies_.clear();
  }

 private:
  // A turn until all its calls have results.
  struct Turn {
    std::vector<ToolCall> calls;
    std::vector<std::optional<std::string>> results = {};
    size_t num_unanswered = 0;
    bool has_end = true;  // as observation_tokens() takes it
    Json template_variables;
    std::string sandbox_error = {};
  };

  // Throws InputError if no sandbox works here.
  void start_python() {
    const CodeConfig code{.sandbox = config_.sandbox};
    python_.emplace("tool python", code_program(config_.program, code), ServerConfig(),
                    WorkerPoolOptions());
    if (config_.program.callback != nullptr) return;  // a replay, which runs nothing
    python_->submit(Json().set("index", 0).set("code", ""), {});
    const Caller::Answer answer = python_->take(RequestPool::Wait::kAll).at(0);
    if (const std::string error = sandbox_error(answer); !error.empty())
      throw InputError("environment.tools: python: " + error);
    log_sandbox("tool python", code, answer.value.at("sandbox").as_string());
  }

  static std::string sandbox_error(const Caller::Answer& answer) {
    const std::string* error = answer.value.find_text("error");
    return error != nullptr ? *error : answer.error;
  }

  void take_outputs(bool wait) {
    if (!python_) return;
    for (const Caller::Answer& answer :
         python_->take(wait ? RequestPool::Wait::kOne : RequestPool::Wait::kNone)) {
      Turn& turn = turns_.at(answer.key.index);
      if (const std::string error = sandbox_error(answer); error.empty())
        turn.results[static_cast<size_t>(answer.key.turn)] = answer.value.at("output").as_string();
      else
        turn.sandbox_error = "tool python: " + error;
      if (--turn.num_unanswered == 0) finish(answer.key.index);
    }
  }

  void finish(int64_t index) {
    EnvironmentReply& reply = replies_.emplace_back();
    reply.index = index;
    const Turn turn = std::move(turns_.extract(index).mapped());
    reply.done = turn.calls.empty();
    reply.error = turn.sandbox_error;
    if (!reply.done && reply.error.empty()) answer(turn, reply);
  }

  void answer(const Turn& turn, EnvironmentReply& reply) const {
    try {
      for (size_t i = 0; i < turn.calls.size(); ++i) {
        const ToolCall& call = turn.calls[i];
        Json message = make_message("tool", *turn.results[i]);
        message.set("name", call.name);
        if (!call.id.empty()) message.set("tool_call_id", call.id);
        reply.messages.push_back(std::move(message));
      }
      reply.tokens =
          observation_tokens(context_, reply.messages, turn.has_end, turn.template_variables);
    } catch (const InputError& e) {
      // The characters of a task need not suffice for the text of an error: such a call is the end.
      if (format_ == ToolFormat::kInline)
        reply = {.index = reply.index, .done = true};
      else
        reply.error = e.what();
    }
  }

  // nullopt: that of the tool python is to be asked for.
  std::optional<std::string> result_of(const ToolCall& call) const {
    if (!call.error.empty()) return str("error: ", call.error);
    const Tool* tool = find_tool(call.name);
    if (std::ranges::find(config_.tools, call.name) == config_.tools.end())
      return str("error: unknown tool ", excerpt(call.name),
                 "; known: ", join(config_.tools, ", "));
    std::string error = argument_error(*tool, call.arguments);
    if (!error.empty()) return error;
    const std::string& argument = call.arguments.at(tool->argument).as_string();
    if (call.name == "python") return std::nullopt;
    return call.name == "search" ? numbered(search_->find(argument, config_.search_results))
                                 : calculate(argument);
  }

  const EnvironmentConfig config_;
  EnvironmentContext context_;
  const ToolFormat format_;
  const Json tools_;
  std::unique_ptr<TextSearch> search_;
  std::optional<Caller> python_;   // its keys: Trajectory::index and the number of the call
  std::map<int64_t, Turn> turns_;  // without all results, by Trajectory::index
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
  ProgramConfig program = config.program;
  program.callback = nullptr;
  if (count("python") == 0 && (config.sandbox != "auto" || program != ProgramConfig()))
    throw InputError(
        "environment: sandbox, workers, timeout and memory: only the tool python takes them");
  if (config.tool_format == ToolFormat::kInline &&
      (count("calculator") == 0 || count("python") > 0))
    throw InputError(str("environment.tools: tool_format: inline ",
                         count("python") > 0 ? "cannot call python" : "needs the calculator"));
  return schemas;
}

std::unique_ptr<Environment> make_tools_environment(const EnvironmentConfig& config,
                                                    EnvironmentContext context, ToolFormat format) {
  return std::make_unique<ToolsEnvironment>(config, std::move(context), format);
}

}  // namespace cohort
