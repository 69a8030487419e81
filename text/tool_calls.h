// Tool calls in the text of a model's turn.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/chat.h"
#include "text/json.h"

namespace cohort {

enum class ToolFormat : uint8_t {
  kAuto,     // the chat template's, found by tool_format_of()
  kHermes,   // <tool_call>{"name": ..., "arguments": {...}}</tool_call>, repeated (Qwen, Hermes)
  kLlama3,   // {"name": ..., "parameters": {...}}, perhaps after <|python_tag|>, separated by ;
  kMistral,  // [TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}, ...], or, repeated,
             // [TOOL_CALLS]NAME[ARGS]{...}, perhaps with [CALL_ID]ID after the name
  kQwenXml,  // <tool_call><function=NAME><parameter=KEY>VALUE</parameter> ... </function>
             // </tool_call>, repeated (Qwen3-Coder, Qwen3.5)
  kInline,   // <<EXPRESSION>>: an argument of the calculator, whose result follows as text
};

struct ToolCall {
  std::string name;
  Json arguments = Json::Object{};
  std::string id;     // as the model wrote it; empty: none
  std::string error;  // what is wrong with the call, as an answer to the model; empty: nothing
};

// The calls of a turn, in order. `text` has the turn's special tokens, without the token that ended
// it. Calls in thinking, between <think> and </think> or [THINK] and [/THINK], are text; so is all
// before a closing tag that no opening one precedes, and after an opening one that is not closed,
// where thinking can begin: at the start of the text or of a line. An opening tag elsewhere is a
// mere mention unless its closing one comes before thinking can begin again.
// There are 32 calls at most, the last of which says so if there are more. Text that begins a call
// but does not parse is a call with an `error`, so that the model gets an answer; the mere tag of
// calls begins none. Never throws for any text.
// kLlama3: an object is a call if it has the name of one of `tools` and arguments. `tools`: a list
// of JSON schemas; null: unknown, and any name will do.
// kQwenXml: a value, without the line breaks around it, is text unless the schema of the argument
// has no text among its types; then it is JSON, or one of Python's True, False and None. `null` is
// null if that is among them. The tags of arguments and </tool_call> cannot be part of a value.
// kInline: only a call that ends the text counts, also in thinking. kAuto: none.
std::vector<ToolCall> parse_tool_calls(ToolFormat format, std::string_view text,
                                       const Json& tools = {});

// The opening tag of thinking that ends a prompt, behind which a turn begins in thinking; else
// empty.
std::string_view opened_thinking(std::string_view prompt);

// The format in which a chat template writes the calls of an assistant's message; nullopt if it
// writes none that is known.
std::optional<ToolFormat> tool_format_of(const ChatFormat& chat);

}  // namespace cohort
