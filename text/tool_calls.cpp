#include "text/tool_calls.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <set>
#include <utility>

#include "core/text.h"
#include "text/utf8.h"

namespace cohort {
namespace {

constexpr std::string_view kSpace = " \t\r\n";
constexpr size_t kMaxCalls = 32;
constexpr std::string_view kEnd = "</tool_call>",
                           kFunction = "<function=", kParameter = "<parameter=";
constexpr std::pair<std::string_view, std::string_view> kPythonConstants[] = {
    {"True", "true"}, {"False", "false"}, {"None", "null"}};
// Opening and closing tags of thinking.
constexpr std::pair<std::string_view, std::string_view> kThinking[] = {{"<think>", "</think>"},
                                                                       {"[THINK]", "[/THINK]"}};

// Reads calls from the start of a text. What is read is removed, with the white space after it.
class CallReader {
 public:
  CallReader(std::string_view text, const Json& tools) : rest_(text), tools_(tools) { remove(0); }
  void hermes();
  void llama3();
  void mistral();
  void qwen_xml();
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
  // Removes what comes before the next `tag` outside of thinking, and the tag; for an empty tag,
  // all up to the end of the next thinking. False without one. Removes the calls in thinking that
  // the prompt has opened.
  bool next(std::string_view tag);
  // next("<tool_call>") of a tag that is no mere mention: one of `starts` follows, and not another
  // closing tag, or the tag and its end are the turn.
  bool next_tagged(std::initializer_list<std::string_view> starts);
  // The text before </tool_call>, which is removed too. Throws InputError without.
  std::string_view take_tagged() {
    const auto text = take_until(kEnd);
    if (!text) fail("<tool_call> is not closed by </tool_call>");
    return *text;
  }
  // Size of the text up to the end of thinking that the prompt may have opened, else of all of it.
  size_t size_of_draft() const;
  // The text before the first `end`, which is removed too; nullopt without, and what can belong to
  // the call is removed.
  std::optional<std::string_view> take_until(std::string_view end);
  // The object or list at the start, or what can belong to it if its brackets do not close; else
  // empty.
  std::string_view take_json();
  // True for a call of a known tool, perhaps a broken one.
  bool is_llama3(std::string_view object) const;
  void read_mistral();
  void read_xml(ToolCall& call, std::string_view text) const;
  // The types of an argument in the tool's schema.
  std::set<std::string> types_of(const ToolCall& call, const std::string& argument) const;

  // Adds a call that read(call) reads, unless there are too many. An InputError becomes the call's
  // error.
  template <class Read>
  void add(const Read& read) {
    if (calls_.size() > kMaxCalls) return;
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

  // True at the start of the rest or of one of its lines, where thinking can begin.
  bool begins_line(size_t at) const {
    const size_t before = rest_.substr(0, at).find_last_not_of(" \t\r");
    return before == rest_.npos || rest_[before] == '\n';
  }

  std::string_view rest_;
  const Json& tools_;
  bool has_thought_ = false;   // a tag of thinking has been read
  bool is_tag_first_ = false;  // nothing but thinking came before the tag that next() has read
  std::vector<ToolCall> calls_;
};

bool CallReader::next(std::string_view tag) {
  // The next closing tag, and the next opening one that begins a line, of each kind of thinking.
  struct Tags {
    size_t closing = 0, beginning = 0;
  };
  std::array<Tags, std::size(kThinking)> tags{};
  for (size_t at = 0; (at = rest_.find_first_of("<[", at)) != rest_.npos; ++at) {
    const std::string_view text = rest_.substr(at);
    if (!tag.empty() && text.starts_with(tag)) {
      is_tag_first_ = at == 0 && calls_.empty();
      remove(at + tag.size());
      return true;
    }
    for (size_t kind = 0; kind < tags.size(); ++kind) {
      const auto& [open, close] = kThinking[kind];
      auto& [closing, beginning] = tags[kind];
      const bool opens = text.starts_with(open);
      if (!opens && (has_thought_ || !text.starts_with(close))) continue;
      if (opens && !begins_line(at)) {
        if (closing < at) closing = rest_.find(close, at);
        while (beginning <= at || (beginning != rest_.npos && !begins_line(beginning)))
          beginning = rest_.find(open, std::max(at, beginning) + 1);
        if (closing == rest_.npos || closing > beginning) continue;  // a mere mention
      }
      if (!opens) calls_.clear();
      has_thought_ = true;
      const size_t size = text.find(close);
      remove(size == text.npos ? rest_.size() : at + size + close.size());
      if (size == text.npos || tag.empty()) return size != text.npos;
      tags = {};
      at = rest_.npos;  // from the start
      break;
    }
  }
  return false;
}

size_t CallReader::size_of_draft() const {
  size_t size = rest_.size();
  if (!has_thought_)
    for (const auto& [open, close] : kThinking) size = std::min(size, rest_.find(close));
  return size;
}

std::optional<std::string_view> CallReader::take_until(std::string_view end) {
  const std::string_view text = rest_.substr(0, size_of_draft());
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
  const std::string_view json = rest_.substr(0, at < rest_.size() ? at + 1 : size_of_draft());
  remove(json.size());
  return json;
}

void CallReader::read_arguments(ToolCall& call, const Json& arguments) const {
  // OpenAI's clients write arguments as JSON text.
  Json object = arguments.is_string() ? parse(arguments.as_string()) : arguments;
  if (!object.is_object()) fail("the arguments are not an object");
  call.arguments = std::move(object);
}

// Name and arguments of a call or schema, which may be in {"type": "function", "function": {...}}.
const Json& unwrapped(const Json& json) {
  const Json* function = json.find("function");
  return function != nullptr && function->is_object() ? *function : json;
}

// The name of a call: also {"type": "function", "function": NAME, ...}.
const std::string* name_of(const Json& call) {
  const std::string* name = unwrapped(call).find_text("name");
  return name == nullptr ? call.find_text("function") : name;
}

void CallReader::read_object(ToolCall& call, const Json& json, const std::string& arguments) const {
  with_location(json, where(), [&] {
    const Json& inner = unwrapped(json);
    for (const Json* object : {&json, &inner})
      for (const auto& [key, value] : object->as_object())
        if (key != "name" && key != arguments && key != "id" && key != "type" && key != "function")
          fail(str("unknown key ", excerpt(key), "; expected: name, ", arguments));
    const std::string* name = name_of(json);
    call.name = name == nullptr ? inner.at("name").as_string() : *name;
    if (call.name.empty()) fail("the name is empty");
    if (json.find("id") != nullptr) call.id = json.at("id").as_string();
    read_arguments(call, inner.at(arguments));
  });
}

bool CallReader::next_tagged(std::initializer_list<std::string_view> starts) {
  while (next("<tool_call>")) {
    if (is_tag_first_ && (rest_.empty() || rest_.ends_with(kEnd))) return true;
    for (const std::string_view start : starts)
      if (rest_.starts_with(start) && !rest_.starts_with("</")) return true;
  }
  return false;
}

void CallReader::hermes() {
  while (next_tagged({"{", "["})) {
    const std::string_view all = rest_;
    add([&](ToolCall& call) {
      Json json;
      try {  // texts in the JSON may have the tag of the end
        json = parse(take_json());
        if (!take(kEnd)) json = {};
      } catch (const InputError&) {
      }
      if (json.is_null()) {
        rest_ = all;
        json = parse(take_tagged());
      }
      read_object(call, json, "arguments");
    });
  }
}

bool CallReader::is_llama3(std::string_view object) const {
  Json call;  // null: broken
  try {
    call = parse_json(object, "");
  } catch (const InputError&) {
  }
  const auto has = [&](const std::string& text) {
    return call.is_null() ? object.find(str('"', text, '"')) != object.npos
                          : unwrapped(call).find(text) != nullptr;
  };
  const std::string* called = name_of(call);
  if (call.is_null() ? !has("name") && !has("function")
                     : called == nullptr || (!has("parameters") && !has("arguments")))
    return false;
  return !tools_.is_array() || std::ranges::any_of(tools_.as_array(), [&](const Json& tool) {
    const std::string* name = name_of(tool);
    return name != nullptr && (called == nullptr ? has(*name) : *name == *called);
  });
}

void CallReader::llama3() {
  constexpr int kMaxTexts = 16;  // before, between and after thinking; each may be read to its end
  for (int i = 0; i == 0 || (i < kMaxTexts && next("")); ++i) {
    take("<|python_tag|>");
    bool more = rest_.starts_with('{') && is_llama3(CallReader(rest_, tools_).take_json());
    while (std::exchange(more, false))
      add([&](ToolCall& call) {
        const std::string_view object = take_json();
        more = take(";") && !object.empty();
        if (!more && !rest_.empty()) fail(str("expected ; before ", excerpt(rest_)));
        const Json json = parse(object);
        read_object(call, json, unwrapped(json).find("arguments") ? "arguments" : "parameters");
      });
  }
}

void CallReader::read_mistral() {
  constexpr std::string_view kId = "[CALL_ID]";
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
  for (const Json& item : list) add([&](ToolCall& call) { read_object(call, item, "arguments"); });
}

void CallReader::mistral() {
  constexpr std::string_view kCalls = "[TOOL_CALLS]";
  while (next(kCalls)) {
    std::string_view word = rest_.substr(0, 200);  // longer ones are no names
    word = word.substr(0, word.find_first_of(kSpace));
    const bool is_turn = is_tag_first_ && word.size() == rest_.size();
    if (word.find_first_of("[{") == word.npos && !is_turn) continue;  // a mere mention
    do read_mistral();
    while (take(kCalls));
    if (next("") || rest_.empty()) continue;
    return add([&](ToolCall&) { fail("expected no text after calls: " + excerpt(rest_)); });
  }
}

void CallReader::qwen_xml() {
  while (next_tagged({"<", "{", "function="}))
    add([&](ToolCall& call) { read_xml(call, take_tagged()); });
}

void CallReader::read_xml(ToolCall& call, std::string_view text) const {
  const auto take = [&](std::string_view start, std::string_view end) {
    const size_t at = text.starts_with(start) ? text.find(end, start.size()) : text.npos;
    if (at == text.npos)
      fail(str("expected ", start, "...", end, ", got ", excerpt(text),
               "; the format is <function=NAME><parameter=KEY>VALUE</parameter></function>"));
    const std::string_view found = text.substr(start.size(), at - start.size());
    text.remove_prefix(at + end.size());
    return found;
  };
  const auto take_space = [&] {
    text.remove_prefix(std::min(text.find_first_not_of(kSpace), text.size()));
  };
  const auto take_name = [&](std::string_view start) {
    const std::string_view name = take(start, ">");
    if (name.empty()) fail("the name is empty");
    if (name.find_first_of("<\n") != name.npos)
      fail(str("expected ", start, "NAME>, got ", start, excerpt(name)));
    return std::string(name);
  };
  call.name = take_name(kFunction);
  for (take_space(); text.starts_with(kParameter); take_space()) {
    const std::string argument = take_name(kParameter);
    std::string_view value = take("", "</parameter>");
    if (value.find(kParameter) != value.npos)
      fail(str("the argument ", excerpt(argument), ": expected </parameter> before ", kParameter));
    if (value.starts_with('\n')) value.remove_prefix(1);
    if (value.ends_with('\n')) value.remove_suffix(1);
    if (call.arguments.find(argument) != nullptr)
      fail(str("the argument ", excerpt(argument), " is there twice"));
    const std::set<std::string> types = types_of(call, argument);
    const bool is_null = value == "null" && types.contains("null");
    if (!is_null && (types.empty() || types.contains("string"))) {
      call.arguments.set(argument, std::string(value));
      continue;
    }
    for (const auto& [python, json] : kPythonConstants)
      if (value == python) value = json;
    call.arguments.set(argument, parse_json(value, str(where(), ": ", argument)));
  }
  take("</function>", "");
  take_space();
  if (!text.empty()) fail("expected nothing after </function>, got " + excerpt(text));
}

std::set<std::string> CallReader::types_of(const ToolCall& call,
                                           const std::string& argument) const {
  if (!tools_.is_array()) return {};
  Json::Array kinds;  // the schema, and its alternatives
  for (const Json& tool : tools_.as_array())
    if (const std::string* name = name_of(tool); name != nullptr && *name == call.name) {
      const Json& schema =
          unwrapped(tool).get_or_null("parameters").get_or_null("properties").get_or_null(argument);
      kinds = schema.get_or_null("anyOf").is_array() ? schema.at("anyOf").as_array()
                                                     : Json::Array{schema};
    }
  std::set<std::string> types;
  for (const Json& kind : kinds) {
    const Json& type = kind.get_or_null("type");
    for (const Json& one : type.is_array() ? type.as_array() : Json::Array{type})
      if (one.is_string()) types.insert(one.as_string());
  }
  return types;
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

std::string_view opened_thinking(std::string_view prompt) {
  prompt = prompt.substr(0, prompt.find_last_not_of(kSpace) + 1);
  for (const auto& [open, close] : kThinking)
    if (prompt.ends_with(open)) return open;
  return {};
}

std::vector<ToolCall> parse_tool_calls(ToolFormat format, std::string_view text,
                                       const Json& tools) {
  CallReader reader(text, tools);
  if (format == ToolFormat::kHermes) reader.hermes();
  if (format == ToolFormat::kLlama3) reader.llama3();
  if (format == ToolFormat::kMistral) reader.mistral();
  if (format == ToolFormat::kQwenXml) reader.qwen_xml();
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
      if (before.ends_with("<tool_call><function=")) return ToolFormat::kQwenXml;
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
