#include "text/tool_calls.h"

#include <algorithm>

#include "core/text.h"
#include "text/utf8.h"

namespace cohort {
namespace {

constexpr std::string_view kSpace = " \t\r\n";

// Reads calls from the start of a text. What is read is removed, with the white space after it.
class CallReader {
 public:
  explicit CallReader(std::string_view text) : rest_(text) { remove(0); }
  void hermes();
  void llama3();
  void mistral();
  void inline_call();
  std::vector<ToolCall>& calls() { return calls_; }

 private:
  void remove(size_t size) {
    rest_.remove_prefix(size);
    rest_.remove_prefix(std::min(rest_.find_first_not_of(kSpace), rest_.size()));
  }
  // False if the text does not begin with `prefix`.
  bool take(std::string_view prefix) {
    const bool found = rest_.starts_with(prefix);
    if (found) remove(prefix.size());
    return found;
  }
  // The text before the first `end`, which is removed too; nullopt, and no text is left, without.
  std::optional<std::string_view> take_until(std::string_view end);
  // The object or list at the start, or the whole text if its brackets do not close; else empty.
  std::string_view take_json();

  // Adds a call that read(call) reads. An InputError becomes the call's error.
  template <class Read>
  void add(const Read& read) {
    ToolCall& call = calls_.emplace_back();
    try {
      read(call);
    } catch (const InputError& e) {
      call.error = repair_utf8(e.what());
    }
  }
  std::string where() const { return str("tool call ", calls_.size()); }
  [[noreturn]] void fail(const std::string& message) const {
    throw InputError(where() + ": " + message);
  }
  Json parse(std::string_view text) const { return parse_json(text, where()); }
  void read_arguments(ToolCall& call, const Json& arguments) const;
  // An object of a name, the arguments under the key `arguments` and, perhaps, an id.
  void read_object(ToolCall& call, const Json& json, const std::string& arguments) const;

  std::string_view rest_;
  std::vector<ToolCall> calls_;
};

std::optional<std::string_view> CallReader::take_until(std::string_view end) {
  const std::string_view text = rest_;
  const size_t at = text.find(end);
  remove(at == text.npos ? text.size() : at + end.size());
  return at == text.npos ? std::nullopt : std::optional(text.substr(0, at));
}

std::string_view CallReader::take_json() {
  if (!rest_.starts_with('{') && !rest_.starts_with('[')) return {};
  size_t at = 0, depth = 0;
  for (bool is_quoted = false; at < rest_.size(); ++at) {
    const char c = rest_[at];
    if (is_quoted && c == '\\')
      ++at;
    else if (c == '"')
      is_quoted = !is_quoted;
    else if (!is_quoted && (c == '{' || c == '['))
      ++depth;
    else if (!is_quoted && (c == '}' || c == ']') && --depth == 0)
      break;
  }
  const std::string_view json = rest_.substr(0, at + 1);
  remove(json.size());
  return json;
}

void CallReader::read_arguments(ToolCall& call, const Json& arguments) const {
  // OpenAI's clients write arguments as JSON text.
  Json object = arguments.is_string() ? parse(arguments.as_string()) : arguments;
  if (!object.is_object()) fail("the arguments are not an object");
  call.arguments = std::move(object);
}

void CallReader::read_object(ToolCall& call, const Json& json, const std::string& arguments) const {
  with_places(json, where(), [&] {
    for (const auto& [key, value] : json.as_object())
      if (key != "name" && key != arguments && key != "id")
        fail(str("unknown key ", excerpt(key), "; expected: name, ", arguments));
    call.name = json.at("name").as_string();
    if (call.name.empty()) fail("the name is empty");
    if (json.find("id") != nullptr) call.id = json.at("id").as_string();
    read_arguments(call, json.at(arguments));
  });
}

void CallReader::hermes() {
  while (take_until("<tool_call>"))
    add([&](ToolCall& call) {
      const auto text = take_until("</tool_call>");
      if (!text) fail("<tool_call> is not closed by </tool_call>");
      read_object(call, parse(*text), "arguments");
    });
}

// An object without a name is no call.
bool may_have_name(std::string_view object) {
  try {
    return parse_json(object, "").find("name") != nullptr;
  } catch (const InputError&) {
    return object.find("\"name\"") != object.npos;
  }
}

void CallReader::llama3() {
  take("<|python_tag|>");
  bool more = rest_.starts_with('{') && may_have_name(CallReader(rest_).take_json());
  while (more)
    add([&](ToolCall& call) {
      const std::string_view object = take_json();
      more = take(";") && !object.empty();
      if (!more && !rest_.empty()) fail(str("expected ; before ", excerpt(rest_)));
      read_object(call, parse(object), "parameters");
    });
}

void CallReader::mistral() {
  constexpr std::string_view kCalls = "[TOOL_CALLS]", kId = "[CALL_ID]";
  for (bool more = take_until(kCalls).has_value(); more; more = take(kCalls)) {
    Json::Array list;
    const bool is_list = rest_.starts_with('[');
    add([&](ToolCall& call) {
      if (is_list) {
        list = parse(take_json()).as_array();
        if (list.empty()) fail("the list is empty");
      } else {  // NAME[ARGS]{...} or NAME[CALL_ID]ID[ARGS]{...}
        std::string_view name = take_until("[ARGS]").value_or("");
        if (const size_t at = name.find(kId); at != name.npos) {
          call.id = name.substr(at + kId.size());
          name = name.substr(0, at);
        }
        if (name.empty() || name.find_first_of("[{ \n") != name.npos)
          fail("expected [TOOL_CALLS]NAME[ARGS]{...}");
        call.name = name;
        read_arguments(call, parse(take_json()));
      }
    });
    if (!list.empty()) calls_.pop_back();
    for (const Json& item : list)
      add([&](ToolCall& call) { read_object(call, item, "arguments"); });
  }
  if (!rest_.empty())
    add([&](ToolCall&) { fail("expected no text after calls: " + excerpt(rest_)); });
}

void CallReader::inline_call() {
  if (!rest_.ends_with(">>")) return;
  add([&](ToolCall& call) {
    call.name = "calculator";
    const std::string_view text = rest_.substr(0, rest_.size() - 2);
    const size_t at = text.rfind("<<");
    if (at == text.npos || text.find(">>", at) != text.npos)
      fail(">> without <<; expected <<EXPRESSION>>");
    call.arguments = Json().set("expression", std::string(text.substr(at + 2)));
  });
}

}  // namespace

std::vector<ToolCall> parse_tool_calls(ToolFormat format, std::string_view text) {
  constexpr size_t kMaxCalls = 32;
  CallReader reader(text);
  if (format == ToolFormat::kHermes) reader.hermes();
  if (format == ToolFormat::kLlama3) reader.llama3();
  if (format == ToolFormat::kMistral) reader.mistral();
  if (format == ToolFormat::kInline) reader.inline_call();
  std::vector<ToolCall>& calls = reader.calls();
  if (calls.size() > kMaxCalls) {
    calls.resize(kMaxCalls);
    calls.back().error = str("a turn may have ", kMaxCalls, " tool calls, this one has more");
  }
  return std::move(calls);
}

std::optional<ToolFormat> tool_format_of(const ChatFormat& chat) {
  const std::string name = "q7tool7q", id = "call10000";
  const Json result = make_message("tool", "q7result7q").set("tool_call_id", id).set("name", name);
  const Json object = Json().set("argument", "q7value7q");
  for (const Json& arguments : {object, Json(object.dump())}) {
    try {
      const Json turn = make_message("assistant", "")
                            .set("tool_calls", Json::Array{make_tool_call(id, name, arguments)});
      std::string text =
          chat.prompt(Json::Array{make_message("user", "q7question7q"), turn, result});
      std::erase_if(text, [](char c) { return kSpace.find(c) != kSpace.npos; });
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
