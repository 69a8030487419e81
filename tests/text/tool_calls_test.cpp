// Tool calls in turns, by format.
#include "text/tool_calls.h"

#include <gtest/gtest.h>

#include "tests/support/test_util.h"
#include "text/utf8.h"

namespace cohort {
namespace {

// "NAME#ID ARGUMENTS" of each call, or "! ERROR"; separated by " | ".
std::string calls_of(ToolFormat format, std::string_view text, const Json& tools = {}) {
  std::string out;
  for (const ToolCall& call : parse_tool_calls(format, text, tools)) {
    if (!out.empty()) out += " | ";
    if (call.error.empty())
      out += str(call.name, call.id.empty() ? "" : "#" + call.id, " ", call.arguments.dump());
    else
      out += "! " + call.error;
  }
  return out;
}

struct ToolCallCase {
  const char *text, *calls;  // a part of the expected calls if it begins with an error
};
void expect_calls(ToolFormat format, std::initializer_list<ToolCallCase> cases,
                  const Json& tools = {}) {
  for (const ToolCallCase& c : cases) {
    const std::string calls = calls_of(format, c.text, tools);
    if (std::string_view(c.calls).starts_with("!"))
      EXPECT_NE(calls.find(c.calls + 2), calls.npos) << c.text << "\n" << calls;
    else
      EXPECT_EQ(calls, c.calls) << c.text;
  }
}

TEST(ToolCalls, QwenXml) {
  const Json tools = parse_json(R"([{"type": "function", "function": {"name": "f", "parameters":
      {"type": "object", "properties": {
        "n": {"type": "integer"}, "text": {"type": "string"}, "maybe": {"type": ["string", "null"]},
        "list": {"type": "array"}, "any": {}, "either": {"anyOf": [{"type": "number"},
        {"type": "null"}]}, "flag": {"type": "boolean"}}}}}])",
                                "tools");
  const auto f = [](const std::string& key, const std::string& value) {
    return str("<tool_call>\n<function=f>\n<parameter=", key, ">\n", value,
               "\n</parameter>\n</function>\n</tool_call>");
  };
  for (const auto& [key, value, expected] :
       {std::tuple{"n", "5", "5"},
        {"n", "None", "null"},
        {"text", "5", "\"5\""},
        {"text", "two\n\n lines </a>", "\"two\\n\\n lines </a>\""},
        {"text", "", "\"\""},
        {"maybe", "None", "\"None\""},
        {"maybe", "null", "null"},
        {"text", "null", "\"null\""},
        {"list", "[1, {\"a\": \"<\"}]", "[1,{\"a\":\"<\"}]"},
        {"any", "5", "\"5\""},
        {"unknown", "[1]", "\"[1]\""},
        {"either", "2.5", "2.5"},
        {"flag", "True", "true"},
        {"flag", "false", "false"}})
    EXPECT_EQ(calls_of(ToolFormat::kQwenXml, f(key, value), tools),
              str("f {\"", key, "\":", expected, "}"));
  expect_calls(
      ToolFormat::kQwenXml,
      {
          {"", ""},
          {"<function=f></function>", ""},
          {"A <tool_call> is a mention.", ""},
          {"<tool_call><function=f></function></tool_call>", "f {}"},
          {"I "
           "add.\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>x</"
           "parameter>"
           "\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
           "f {\"a\":\"1\",\"b\":\"x\"} | g {}"},
          {"<think><tool_call><function=g></function></tool_call></think>\n"
           "<tool_call><function=f></function></tool_call>",
           "f {}"},
          {"<tool_call><function=f></function>", "! tool call 1: <tool_call> is not closed"},
          {"<tool_call>", "! is not closed by </tool_call>"},
          {"<tool_call></tool_call>", "! tool call 1: expected <function=...>, got ''"},
          {"<tool_call><function=></function></tool_call>", "! the name is empty"},
          {"<tool_call><function=f><parameter=></parameter></function></tool_call>",
           "! the name is empty"},
          {"<tool_call><function=f\n<parameter=a>1</parameter></function></tool_call>",
           "! expected <function=NAME>, got <function='f\\n<parameter=a'"},
          {"<tool_call><function=f><parameter=a>1<parameter=b>2</parameter></function></tool_call>",
           "! the argument 'a': expected </parameter> before <parameter="},
          {"I add. <tool_call>{\"name\": \"f\"}</tool_call>", "! expected <function=...>, got '{"},
          {"The tags <tool_call></tool_call> enclose calls.", ""},
          {"<tool_call><function=f</tool_call>", "! expected <function=...>, got '<function=f'"},
          {"<tool_call><function=f><parameter=a>1</function></tool_call>",
           "! expected ...</parameter>, got '1</function>'"},
          {"<tool_call><function=f>x</function></tool_call>",
           "! expected </function>..., got 'x</function>'"},
          {"<tool_call><function=f></function>x</tool_call>",
           "! expected nothing after </function>, got 'x'"},
          {"<tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>"
           "</tool_call>",
           "! the argument 'a' is there twice"},
      });
  EXPECT_NE(
      calls_of(ToolFormat::kQwenXml, f("n", "five"), tools).find("! tool call 1: n: not valid"),
      std::string::npos);
}

// A call that lacks a tag, or a character of one, is an error; without its first tag it is text.
TEST(ToolCalls, QwenXmlBrokenAnywhere) {
  const std::string_view call =
      "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n"
      "</parameter>\n</function>\n</tool_call>";
  const std::string_view first = "<tool_call>";
  for (const std::string before : {"", "<think>\nI add.\n</think>\n\n", "I add.\n"}) {
    ASSERT_EQ(calls_of(ToolFormat::kQwenXml, str(before, call)), "f {\"a\":\"1\",\"b\":\"2\"}");
    const auto expect_error = [&](size_t at, size_t size) {
      const std::string text = str(before, call.substr(0, at), call.substr(at + size));
      const std::string calls = calls_of(ToolFormat::kQwenXml, text);
      EXPECT_TRUE(at < first.size() ? calls.empty() : calls.starts_with("! tool call 1: "))
          << text << "\n"
          << calls;
    };
    for (size_t begin = call.find('<'); begin != call.npos; begin = call.find('<', begin + 1)) {
      const size_t end = call.find('>', begin) + 1, name = call.substr(0, end).find('=', begin) + 1;
      expect_error(begin, end - begin);
      for (size_t at = begin; at < end; ++at)
        if (at != name || name == 0) expect_error(at, 1);
    }
    for (size_t size = first.size() + 2; size < call.size(); ++size)  // truncated
      EXPECT_TRUE(calls_of(ToolFormat::kQwenXml, str(before, call.substr(0, size)))
                      .starts_with("! tool call 1: "))
          << size;
  }
}

TEST(ToolCalls, Hermes) {
  expect_calls(
      ToolFormat::kHermes,
      {
          {"", ""},
          {"2 < 3, {\"name\": \"f\"}", ""},
          {"I add.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, "
           "\"<\"]}}\n</tool_call>",
           "f {\"a\":[1,\"<\"]}"},
          {"<tool_call>{\"arguments\": {}, \"name\": \"f\"}</tool_call> and "
           "<tool_call>{\"name\": \"g\", \"arguments\": \"{\\\"b\\\": 2}\"}</tool_call> done",
           "f {} | g {\"b\":2}"},
          {"<tool_call>{\"name\": \"f\", \"arguments\": {}}", "! tool call 1: <tool_call> is not"},
          {"<tool_call>", "! is not closed by </tool_call>"},
          {"<tool_call></tool_call>", "! tool call 1: not valid JSON"},
          {"<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call><tool_call>{,</tool_call>",
           "! f {} | ! tool call 2: not valid JSON"},
          {"<tool_call>{,</tool_call><tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>",
           "! byte 2 | f {}"},
          {"<tool_call>{\"arguments\": {}}</tool_call>", "! missing key 'name'"},
          {"<tool_call>{\"name\": 5, \"arguments\": {}}</tool_call>",
           "! tool call 1: name: expected text, got a whole number"},
          {"<tool_call>{\"name\": \"\", \"arguments\": {}}</tool_call>", "! the name is empty"},
          {"<tool_call>{\"name\": \"f\"}</tool_call>", "! missing key 'arguments'"},
          {"<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>", "! not an object"},
          {"<tool_call>{\"name\": \"f\", \"arguments\": \"1\"}</tool_call>", "! not an object"},
          {"<tool_call>{\"name\": \"f\", \"arguments\": \"{\"}</tool_call>", "! not valid JSON"},
          {"<tool_call>{\"name\": \"f\", \"arguments\": {}, \"id\": \"1\"}</tool_call>", "f#1 {}"},
          {"<tool_call>{\"name\": \"f\", \"arguments\": {}, \"x\": \"1\"}</tool_call>",
           "! unknown key 'x'; expected: name, arguments"},
          {"<tool_call>[]</tool_call>", "! expected an object, got a list"},
      });
}

TEST(ToolCalls, Llama3) {
  expect_calls(
      ToolFormat::kLlama3,
      {
          {"", ""},
          {"The result is 4.", ""},
          {"I call {\"name\": \"f\", \"parameters\": {}}", ""},
          {"{\"answer\": 4}", ""},
          {"{\"person\": {\"name\": \"Ada\"}}", ""},
          {"<|python_tag|>print(\"name\")", ""},
          {" {\"name\": \"f\", \"parameters\": {\"a\": \"};\\\"{\"}} ", "f {\"a\":\"};\\\"{\"}"},
          {"<|python_tag|> {\"name\": \"f\", \"parameters\": {}}; {\"name\": \"g\", "
           "\"parameters\": {\"x\": {}}}",
           "f {} | g {\"x\":{}}"},
          {"{\"name\": \"f\", \"arguments\": {}}", "f {}"},
          {"{\"name\": \"f\", \"arguments\": {}, \"parameters\": {}}",
           "! unknown key 'parameters'"},
          {"{\"name\": \"f\", \"parameters\": {}", "! tool call 1: not valid JSON"},
          {"{\"name\": \"f\", \"parameters\": {}} and more", "! expected ; before 'and more'"},
          {"{\"name\": \"f\", \"parameters\": {}};", "! f {} | ! tool call 2: not valid JSON"},
          {"{\"name\": \"f\", \"parameters\": 1};{\"name\": \"g\", \"parameters\": {}}",
           "! not an object | g {}"},
      });
}

TEST(ToolCalls, Mistral) {
  expect_calls(
      ToolFormat::kMistral,
      {
          {"no call [1]", ""},
          {"Sum. [TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {}, \"id\": \"abcdefghi\"}, "
           "{\"name\": \"g\", \"arguments\": {\"a\": \"]\"}}]",
           "f#abcdefghi {} | g {\"a\":\"]\"}"},
          {"[TOOL_CALLS]f[ARGS]{\"a\": \"[TOOL_CALLS]\"}[TOOL_CALLS]g[CALL_ID]x1[ARGS] {}",
           "f {\"a\":\"[TOOL_CALLS]\"} | g#x1 {}"},
          {"[TOOL_CALLS]", "! expected [TOOL_CALLS]NAME[ARGS]{...}"},
          {"[TOOL_CALLS][]", "! the list is empty"},
          {"[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}}", "! tool call 1: not valid JSON"},
          {"[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}}, 1]", "! f {} | ! tool call 2: exp"},
          {"[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}, \"id\": 1}]",
           "! id: expected text, got a whole number"},
          {"[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}}] so", "! expected no text after"},
          {"[TOOL_CALLS]f{}", "! expected [TOOL_CALLS]NAME"},
          {"[TOOL_CALLS]f[TOOL_CALLS]g[ARGS]{}", "! expected [TOOL_CALLS]NAME"},
          {"[TOOL_CALLS]f[ARGS][1]", "! the arguments are not an object"},
          {"[TOOL_CALLS]f[ARGS]1", "! tool call 1: not valid JSON"},
          {"[TOOL_CALLS]f[ARGS]{\"a\": }[TOOL_CALLS]g[ARGS]{}", "! byte 7"},
      });
}

TEST(ToolCalls, Inline) {
  expect_calls(ToolFormat::kInline,
               {
                   {"2 + 2", ""},
                   {"<<2>> is 2", ""},
                   {"It is <<2 + 2>>", "calculator {\"expression\":\"2 + 2\"}"},
                   {"<<1>>1, so <<2<3>>", "calculator {\"expression\":\"2<3\"}"},
                   {"<<>>", "calculator {\"expression\":\"\"}"},
                   {"a >>", "! tool call 1: >> without <<"},
                   {"<<1>> a >>", "! >> without <<"},
                   {">>", "! >> without <<"},
               });
}

TEST(ToolCalls, Llama3CallsNameAKnownTool) {
  const Json tools = parse_json(
      R"([{"type": "function", "function": {"name": "add"}}, {"name": "now", "parameters": {}}])",
      "tools");
  const std::initializer_list<ToolCallCase> cases = {
      {R"({"name": "add", "parameters": {"a": 1}})", R"(add {"a":1})"},
      {R"({"name": "now", "parameters": {}})", "now {}"},
      // Answers in JSON.
      {R"({"name": "Ada", "parameters": {"born": 1815}})", ""},
      {R"({"name": "Ada", "arguments": ["x"]})", ""},
      {R"({"name": "Ada"})", ""},
      {R"({"name": "add"})", ""},
      {R"({"name": ["add"], "parameters": {}})", ""},
      {R"({"parameters": {"name": "add"}})", ""},
      {R"({"name": "Ada", "born": })", ""},
      {R"({"type": "function", "f": "x"})", ""},
      {R"({"type": "function", "function": {"name": "Ada", "parameters": {}}})", ""},
      {R"(<|python_tag|>{"name": "Ada", "parameters": {}})", ""},
      // Broken calls.
      {R"({"name": "add", "parameters": {"a": })", "! tool call 1: not valid JSON"},
      {R"({"name": "add", "param)", "! tool call 1: not valid JSON"},
      {R"({"name": "add", "parameters": [1]})", "! the arguments are not an object"},
      // Forms of the same call.
      {R"({"type": "function", "name": "add", "parameters": {"a": 1}})", R"(add {"a":1})"},
      {R"({"type": "function", "function": "add", "parameters": {"a": 1}})", R"(add {"a":1})"},
      {R"({"type": "function", "function": {"name": "add", "parameters": {"a": 1}}})",
       R"(add {"a":1})"},
      {R"({"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{\"a\": 1}"}})",
       R"(add#c1 {"a":1})"},
      {R"(<|python_tag|>{"type": "function", "name": "add", "parameters": {}}; {"name": "now", "parameters": {}})",
       "add {} | now {}"},
  };
  expect_calls(ToolFormat::kLlama3, cases, tools);
  EXPECT_EQ(calls_of(ToolFormat::kLlama3, R"({"name": "add", "parameters": {}})", Json::Array{}),
            "");
}

constexpr const char* kHermesCall =
    R"(<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>)";
constexpr const char* kMistralCall = R"([TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}])";
constexpr const char* kLlama3Call = R"({"name": "f", "parameters": {"a": 1}})";

TEST(ToolCalls, DraftsInThinkingAreText) {
  const std::string called = R"(f {"a":1})";
  for (const auto& [format, call] : {std::pair(ToolFormat::kHermes, std::string(kHermesCall)),
                                     {ToolFormat::kMistral, std::string(kMistralCall)},
                                     {ToolFormat::kLlama3, std::string(kLlama3Call)}})
    for (const auto& [open, close] :
         {std::pair<std::string, std::string>{"<think>", "</think>"}, {"[THINK]", "[/THINK]"}}) {
      const auto calls = [&, f = format](const std::string& text) { return calls_of(f, text); };
      EXPECT_EQ(calls(open + call + close), "");
      EXPECT_EQ(calls(open + "\n" + call + "\n" + close + "\n\nIt is 4."), "");
      EXPECT_EQ(calls("\n" + open + " a " + call + close + "\n" + call + "\n"), called);
      EXPECT_EQ(calls(open + call + close + open + call + close + call), called);
      // Not closed: all of the rest.
      EXPECT_EQ(calls(open + " so " + call), "");
      EXPECT_EQ(calls(open + close + open + call + call), "");
      // Opened by the prompt.
      EXPECT_EQ(calls(call + close), "");
      EXPECT_EQ(calls(call + "\nhm " + close + "\n4"), "");
      EXPECT_EQ(calls(call + close + "\n" + call), called);
      EXPECT_EQ(calls("no call " + close + call), called);
      // A draft that does not end.
      EXPECT_EQ(calls(call.substr(0, call.find("1}")) + " hm " + close + "4"), "") << call;
      EXPECT_EQ(calls(call.substr(0, call.find("1}")) + close + call), called);
      EXPECT_EQ(calls(open + call.substr(0, 20) + close + call), called);
    }
  EXPECT_EQ(calls_of(ToolFormat::kHermes, str("<think>", kHermesCall, "[/THINK]", kHermesCall)),
            "");
  // A closing tag after thinking that the text has opened is text.
  EXPECT_EQ(calls_of(ToolFormat::kHermes, str("<think></think>", kHermesCall, "</think>")), called);
  // Many drafts.
  std::string drafts;
  for (int i = 0; i < 40; ++i) drafts += kHermesCall;
  EXPECT_EQ(calls_of(ToolFormat::kHermes, drafts + "</think>" + kHermesCall), called);
}

// Thinking that is not closed begins at the start of the text or of a line.
TEST(ToolCalls, AMentionOfThinkingIsText) {
  for (const auto& [format, call] : {std::pair(ToolFormat::kHermes, std::string(kHermesCall)),
                                     {ToolFormat::kMistral, std::string(kMistralCall)}})
    for (const auto& [open, close] :
         {std::pair<std::string, std::string>{"<think>", "</think>"}, {"[THINK]", "[/THINK]"}}) {
      const std::string called = R"(f {"a":1})";
      const auto calls = [&, f = format](const std::string& text) { return calls_of(f, text); };
      EXPECT_EQ(calls("I know no " + open + " tag.\n" + call), called);
      EXPECT_EQ(calls("`" + open + "` " + call), called);
      EXPECT_EQ(calls("Between " + open + " and " + close + " I think. " + call), called);
      EXPECT_EQ(calls("I have no " + open + ", " + open + " or so. " + call), called);
      EXPECT_EQ(calls("A " + open + " tag.\n" + open + call + close + call), called);
      EXPECT_EQ(calls("So " + open + call + close + " 4"), "");
      EXPECT_EQ(calls("So " + open + call + " or " + open + " again " + close + call), called);
      EXPECT_EQ(calls("So \n \t" + open + call), "");
      EXPECT_EQ(calls(open + " the " + open + " tag " + call), "");
      EXPECT_EQ(calls(open + close + " the " + open + " tag " + call), called);
    }
}

TEST(ToolCalls, TextsOfArgumentsMayHaveTags) {
  for (const char* tag : {"</tool_call>", "<tool_call>", "<think>", "</think>", "[THINK]",
                          "[/THINK]", "[TOOL_CALLS]", "\\\"}", "]", "<|python_tag|>", ";"}) {
    const std::string object = str("{\"a\": \"x", tag, "y\"}");
    const std::string call = "f " + parse_json(object, "").dump();
    EXPECT_EQ(calls_of(ToolFormat::kHermes, str("<tool_call>\n{\"name\": \"f\", \"arguments\": ",
                                                object, "}\n</tool_call>\n", kHermesCall)),
              call + R"( | f {"a":1})");
    EXPECT_EQ(calls_of(ToolFormat::kMistral,
                       str("[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": ", object, "}]")),
              call);
    EXPECT_EQ(calls_of(ToolFormat::kMistral, str("[TOOL_CALLS]f[ARGS]", object, kMistralCall)),
              call + R"( | f {"a":1})");
    EXPECT_EQ(calls_of(ToolFormat::kLlama3,
                       str("{\"name\": \"f\", \"parameters\": ", object, "};", kLlama3Call)),
              call + R"( | f {"a":1})");
  }
  // Broken calls end at the first tag, and the next one is read.
  for (const char* broken :
       {R"({"name": "f", "arguments": {"x": "say "hi}"}})", "{'name': 'f'}",
        R"({"name": "f", "arguments": {}}})", R"({"name": "f", "arguments": {)",
        R"({"name": "f", "arguments": {"x": "a"b"}})"}) {
    const std::string calls =
        calls_of(ToolFormat::kHermes, str("<tool_call>", broken, "</tool_call>", kHermesCall));
    EXPECT_TRUE(calls.starts_with("! tool call 1: not valid JSON: ")) << broken << calls;
    EXPECT_TRUE(calls.ends_with(R"( | f {"a":1})")) << broken << calls;
  }
}

TEST(ToolCalls, AMentionOfTheirTagIsText) {
  for (const char* text :
       {"I do not need the <tool_call> tag: 4.", "There is no <tool_call>", "`<tool_call>`",
        "Calls are between <tool_call> and </tool_call>.", "the <tool_call></tool_call> tags",
        "<tool_call> is a tag.", "Use <tool_call>...</tool_call>, and then wait"})
    EXPECT_EQ(calls_of(ToolFormat::kHermes, text), "") << text;
  EXPECT_EQ(calls_of(ToolFormat::kHermes, str("With <tool_call>, I call: ", kHermesCall)),
            R"(f {"a":1})");
  EXPECT_EQ(calls_of(ToolFormat::kHermes, str("<think>x</think>\n<tool_call>f(1)</tool_call>"))
                .substr(0, 29),
            "! tool call 1: not valid JSON");
  for (const char* text : {"I do not need [TOOL_CALLS] here.", "`[TOOL_CALLS]`", "no [TOOL_CALLS]",
                           "[TOOL_CALLS] is a token", "([TOOL_CALLS]) 4"})
    EXPECT_EQ(calls_of(ToolFormat::kMistral, text), "") << text;
  EXPECT_EQ(calls_of(ToolFormat::kMistral, str("With [TOOL_CALLS] I call: ", kMistralCall)),
            R"(f {"a":1})");
}

TEST(ToolCalls, PromptsMayOpenThinking) {
  EXPECT_EQ(opened_thinking("<|assistant|>\n<think>\n"), "<think>");
  EXPECT_EQ(opened_thinking("[THINK]"), "[THINK]");
  for (const char* prompt : {"", "<think>\n\n</think>\n\n", "<think> so", "think>"})
    EXPECT_EQ(opened_thinking(prompt), "") << prompt;
}

TEST(ToolCalls, HostileTextsTakeLinearTimeAndGiveTextForErrors) {
  for (const char* unit :
       {"<tool_call>",
        "<tool_call></tool_call>",
        "[TOOL_CALLS]",
        "[TOOL_CALLS]f[ARGS]{}",
        "{",
        ";",
        "[TOOL_CALLS][",
        "<tool_call>{",
        "<tool_call>{\"",
        "<think></think>",
        "<think></think>{",
        "</think>{",
        "<think>",
        "x<think>",
        "x<think>x[THINK]",
        "[THINK][/THINK][TOOL_CALLS]",
        "<",
        "<<",
        ">>",
        "{\"name\": {",
        "\"",
        "\\",
        "{\"name\":\"f\",\"parameters\":{}};",
        "\xff",
        "<tool_call>{\"\xff\"}</tool_call>",
        "<function=f><parameter=a>1</parameter>",
        "<tool_call><function=f><parameter=\xff>\xff</parameter></function></tool_call>"})
    for (const ToolFormat format :
         {ToolFormat::kAuto, ToolFormat::kHermes, ToolFormat::kLlama3, ToolFormat::kMistral,
          ToolFormat::kQwenXml, ToolFormat::kInline})
      for (const char* before : {"", "{\"name\"", "[TOOL_CALLS]", "[TOOL_CALLS][", "<tool_call>"}) {
        const bool is_long = *before == 0 || format == ToolFormat::kAuto;
        const size_t bytes = is_long ? 1 << 17 : 1 << 15;
        std::string text = before;
        while (text.size() < bytes) text += unit;
        for (const ToolCall& call : parse_tool_calls(format, text + ">>"))
          ASSERT_TRUE(call.error.size() < 1000 && is_utf8(call.error)) << unit;
      }
}

}  // namespace
}  // namespace cohort
