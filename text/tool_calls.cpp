#include "text/tool_calls.h"

#include <algorithm>

#include "core/text.h"
#include "text/utf8.h"

namespace cohort {
namespace {

constexpr std::string_view kSpace = " \t\r\n";

std::string_view skip_space(std::string_view text) {
  return text.substr(std::min(text.find_first_not_of(kSpace), text.size()));
}

// Removes `prefix` from the text. False if the text does not begin with it.
bool take(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

// Removes the text before the first `end`, and `end`. nullopt if there is none; the text stays.
std::optional<std::string_view> take_until(std::string_view& text, std::string_view end) {
  const size_t at = text.find(end);
  if (at == text.npos) return std::nullopt;
  const std::string_view before = text.substr(0, at);
  text.remove_prefix(at + end.size());
  return before;
}

// Removes the object or list that the text begins with; all of it if its brackets do not close.
std::string_view take_json(std::string_view& text) {
  size_t at = 0, depth = 0;
  for (bool is_quoted = false; at < text.size(); ++at) {
    const char c = text[at];
    if (is_quoted && c == '\\')
      ++at;
    else if (c == '"')
      is_quoted = !is_quoted;
    else if (!is_quoted && (c == '{' || c == '['))
      ++depth;
    else if (!is_quoted && (c == '}' || c == ']') && --depth == 0)
      break;
  }
  const std::string_view json = text.substr(0, at + 1);
  text.remove_prefix(json.size());
  return json;
}

// The calls of a text, read one after the other.
class Calls {
 public:
  // read(call) reads the next call; what it throws is the call's error. False if it has one.
  template <class Read>
  bool add(const Read& read) {
    ToolCall& call = calls_.emplace_back();
    try {
      read(call);
    } catch (const InputError& e) {
      call.error = repair_utf8(e.what());
    }
    return call.error.empty();
  }
  // The place of the call that is read now, for errors.
  std::string where() const { return str("tool call ", calls_.size()); }
  [[noreturn]] void fail(const std::string& message) const {
    throw InputError(str(where(), ": ", message));
  }

  // An object with a name and arguments, and perhaps an id.
  void read_object(ToolCall& call, const Json& json, const std::string& arguments, bool has_id) {
    with_places(json, where(), [&] {
      std::vector<std::string> keys{"name", arguments};
      if (has_id) keys.emplace_back("id");
      for (const auto& [key, value] : json.as_object())
        if (std::find(keys.begin(), keys.end(), key) == keys.end())
          fail(str("unknown key ", excerpt(key), "; expected: ", join(keys, ", ")));
      call.name = json.at("name").as_string();
      if (call.name.empty()) fail("the name is empty");
      if (json.find("id") != nullptr) call.id = json.at("id").as_string();
      read_arguments(call, json.at(arguments));
    });
  }
  void read_object(ToolCall& call, std::string_view text, const std::string& arguments) {
    read_object(call, parse_json(text, where()), arguments, false);
  }
  // OpenAI's clients write arguments as JSON text.
  void read_arguments(ToolCall& call, const Json& arguments) {
    Json object = arguments.is_string() ? parse_json(arguments.as_string(), where()) : arguments;
    if (!object.is_object()) fail("the arguments are not an object");
    call.arguments = std::move(object);
  }

  bool any() const { return !calls_.empty(); }
  std::vector<ToolCall> take() && { return std::move(calls_); }

 private:
  std::vector<ToolCall> calls_;
};

std::vector<ToolCall> parse_hermes(std::string_view text) {
  Calls calls;
  while (take_until(text, "<tool_call>")) {
    const bool closed = text.find("</tool_call>") != text.npos;
    calls.add([&](ToolCall& call) {
      if (!closed) calls.fail("<tool_call> is not closed by </tool_call>");
      calls.read_object(call, *take_until(text, "</tool_call>"), "arguments");
    });
    if (!closed) break;
  }
  return std::move(calls).take();
}

// A text is a call if it begins with an object that has a name, or might have one if it parsed.
bool is_llama3_call(std::string_view text) {
  if (!text.starts_with('{')) return false;
  const std::string_view object = take_json(text);
  try {
    return parse_json(object, "tool call").find("name") != nullptr;
  } catch (const InputError&) {
    return object.find("\"name\"") != object.npos;
  }
}

std::vector<ToolCall> parse_llama3(std::string_view text) {
  text = skip_space(text);
  if (take(text, "<|python_tag|>")) text = skip_space(text);
  Calls calls;
  for (bool more = is_llama3_call(text); more;)
    calls.add([&](ToolCall& call) {
      const std::string_view object = text.starts_with('{') ? take_json(text) : "";
      text = skip_space(text);
      more = take(text, ";") && !object.empty();
      text = skip_space(text);
      if (object.empty()) calls.fail("expected an object after ;");
      if (!more && !text.empty()) calls.fail(str("expected ; before ", excerpt(text)));
      calls.read_object(call, object, "parameters");
    });
  return std::move(calls).take();
}

// Reads [{"name": ..., "arguments": ..., "id": ...}, ...].
void read_mistral_list(Calls& calls, std::string_view& text) {
  const std::string_view json = take_json(text);
  Json list = Json::Array{};
  size_t i = 0;
  do
    calls.add([&](ToolCall& call) {
      if (i == 0) list = parse_json(json, calls.where());
      if (list.as_array().empty()) calls.fail("the list is empty");
      calls.read_object(call, list.as_array()[i], "arguments", true);
    });
  while (++i < list.as_array().size());
}

// Reads NAME[ARGS]{...} or NAME[CALL_ID]ID[ARGS]{...}.
void read_mistral_call(Calls& calls, std::string_view& text) {
  calls.add([&](ToolCall& call) {
    const auto head = take_until(text, "[ARGS]");
    std::string_view id = head.value_or("");
    const std::string_view name = take_until(id, "[CALL_ID]").value_or(id);
    text = skip_space(text);
    if (!head || name.empty() || name.find_first_of("[{ \n") != name.npos ||
        !text.starts_with('{')) {
      text = {};
      calls.fail("expected [TOOL_CALLS]NAME[ARGS]{...}");
    }
    const std::string_view arguments = take_json(text);
    call.name = name;
    if (id != name) call.id = id;
    calls.read_arguments(call, parse_json(arguments, calls.where()));
  });
}

std::vector<ToolCall> parse_mistral(std::string_view text) {
  Calls calls;
  for (bool more = take_until(text, "[TOOL_CALLS]").has_value(); more;) {
    text = skip_space(text);
    if (text.starts_with('['))
      read_mistral_list(calls, text);
    else
      read_mistral_call(calls, text);
    text = skip_space(text);
    more = take(text, "[TOOL_CALLS]");
  }
  if (!text.empty() && calls.any())
    calls.add([&](ToolCall&) { calls.fail(str("expected no text after calls: ", excerpt(text))); });
  return std::move(calls).take();
}

std::vector<ToolCall> parse_inline(std::string_view text) {
  Calls calls;
  if (!text.ends_with(">>")) return {};
  text.remove_suffix(2);
  calls.add([&](ToolCall& call) {
    call.name = "calculator";
    const size_t at = text.rfind("<<");
    if (at == text.npos || text.find(">>", at) != text.npos)
      calls.fail(">> without <<; expected <<EXPRESSION>>");
    call.arguments = Json().set("expression", std::string(text.substr(at + 2)));
  });
  return std::move(calls).take();
}

std::string without_space(std::string_view text) {
  std::string out;
  for (const char c : text)
    if (kSpace.find(c) == kSpace.npos) out += c;
  return out;
}

}  // namespace

std::vector<ToolCall> parse_tool_calls(ToolFormat format, std::string_view text) {
  switch (format) {
    case ToolFormat::kAuto:
      break;  // no format
    case ToolFormat::kHermes:
      return parse_hermes(text);
    case ToolFormat::kLlama3:
      return parse_llama3(text);
    case ToolFormat::kMistral:
      return parse_mistral(text);
    case ToolFormat::kInline:
      return parse_inline(text);
  }
  return {};
}

std::optional<ToolFormat> tool_format_of(const ChatFormat& chat) {
  const std::string name = "q7tool7q", id = "call10000";
  const Json result = make_message("tool", "q7result7q").set("tool_call_id", id).set("name", name);
  const Json object = Json().set("argument", "q7value7q");
  for (const Json& arguments : {object, Json(object.dump())}) {
    try {
      const Json turn = make_message("assistant", "")
                            .set("tool_calls", Json::Array{make_tool_call(id, name, arguments)});
      const std::string text = without_space(
          chat.prompt(Json::Array{make_message("user", "q7question7q"), turn, result}));
      const size_t at = std::min(text.find(name), text.size());
      const std::string_view before = std::string_view(text).substr(0, at);
      const std::string_view after = std::string_view(text).substr(at);
      const auto is_object = [&](const std::string& start, const char* arguments_key) {
        return before.ends_with(start + "{\"name\":\"") &&
               after.starts_with(str(name, "\",\"", arguments_key, "\":"));
      };
      if (is_object("<tool_call>", "arguments")) return ToolFormat::kHermes;
      if (is_object("", "parameters")) return ToolFormat::kLlama3;
      if (before.ends_with("[TOOL_CALLS]") || is_object("[TOOL_CALLS][", "arguments"))
        return ToolFormat::kMistral;
    } catch (const InputError&) {
      // The template takes no such arguments, or no tools.
    }
  }
  return std::nullopt;
}

}  // namespace cohort
