#include "text/tool_calls.h"

namespace cohort {

std::vector<ToolCall> parse_tool_calls(ToolFormat, std::string_view) {
  throw Error("not there yet");
}

std::optional<ToolFormat> tool_format_of(const ChatFormat&) {
  throw Error("not there yet");
}

}  // namespace cohort
