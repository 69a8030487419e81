// Tool calls in turns, by format.
#include "text/tool_calls.h"

#include <gtest/gtest.h>

#include "tests/support/test_util.h"
#include "text/utf8.h"

namespace cohort {
namespace {

// "NAME#ID ARGUMENTS" of each call, or "! ERROR"; separated by " | ".
std::string calls_of(ToolFormat format, std::string_view text) {
  std::string out;
  for (const ToolCall& call : parse_tool_calls(format, text)) {
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
void expect_calls(ToolFormat format, std::initializer_list<ToolCallCase> cases) {
  for (const ToolCallCase& c : cases) {
    const std::string calls = calls_of(format, c.text);
    if (std::string_view(c.calls).starts_with("!"))
      EXPECT_NE(calls.find(c.calls + 2), calls.npos) << c.text << "\n" << calls;
    else
      EXPECT_EQ(calls, c.calls) << c.text;
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
          {"{\"name\": \"f\", \"arguments\": {}}", "! unknown key 'arguments'"},
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

TEST(ToolCalls, HostileTextsTakeLinearTimeAndGiveTextForErrors) {
  constexpr size_t kBytes = 1 << 18;
  for (const char* unit :
       {"<tool_call>", "<tool_call></tool_call>", "[TOOL_CALLS]", "[TOOL_CALLS]f[ARGS]{}", "{", ";",
        "[TOOL_CALLS][", "<<", ">>", "{\"name\": {", "\"", "\\",
        "{\"name\":\"f\",\"parameters\":{}};", "\xff", "<tool_call>{\"\xff\"}</tool_call>"})
    for (const ToolFormat format : {ToolFormat::kAuto, ToolFormat::kHermes, ToolFormat::kLlama3,
                                    ToolFormat::kMistral, ToolFormat::kInline})
      for (const char* before : {"", "{\"name\"", "[TOOL_CALLS]", "[TOOL_CALLS][", "<tool_call>"}) {
        std::string text = before;
        while (text.size() < kBytes) text += unit;
        for (const ToolCall& call : parse_tool_calls(format, text + ">>"))
          ASSERT_TRUE(call.error.size() < 1000 && is_utf8(call.error)) << unit;
      }
}

}  // namespace
}  // namespace cohort
