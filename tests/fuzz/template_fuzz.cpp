// Input: a chat template, rendered for two contexts. An InputError is an expected result.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "text/chat_template.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using cohort::Json;
  static const Json contexts[] = {Json(Json::Object{}), cohort::parse_json(R"({
        "messages": [{"role": "system", "content": "You help."},
                     {"role": "user", "content": "Gr\u00fc\u00dfe <b>"},
                     {"role": "assistant", "content": null, "tool_calls": [{"function":
                       {"name": "f", "arguments": {"x": 1.5, "y": [1, -2, {"z": true}]}}}]}],
        "tools": [], "add_generation_prompt": true, "bos_token": "<s>", "x": 7})",
                                                                           "context")};
  // Few steps, so that loops take little time; the other limits are the defaults.
  cohort::RenderOptions options{.now = std::tm{.tm_mday = 1, .tm_year = 125}, .limits = {}};
  options.limits.steps = 50'000;
  try {
    const cohort::ChatTemplate chat_template(
        std::string_view(reinterpret_cast<const char*>(data), size), "fuzz");
    for (const Json& context : contexts) {
      try {
        chat_template.render(context, options);
      } catch (const cohort::InputError&) {
      }
    }
  } catch (const cohort::InputError&) {
  }
  return 0;
}
