// Chat templates: the Jinja that models ship with, rendered as the transformers library does.
//
// The language is Jinja2 3.1's in a sandbox (https://jinja.palletsprojects.com/en/3.1.x/templates):
// values are Python's, nothing can be loaded or changed outside the template's own variables.
#pragma once

#include <cstdint>
#include <ctime>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sys/input_file.h"
#include "text/json.h"

namespace cohort {

namespace jinja {
struct Document;
}

// Limits of one rendering; exceeding one is an InputError.
struct RenderLimits {
  int64_t steps = 15'000'000;     // evaluated nodes, iterated items, and units of 16 bytes
  int64_t text_bytes = 32 << 20;  // limit of each text, and of the output
  int depth = 600;                // nested evaluations; each macro call takes several
};

struct RenderOptions {
  std::optional<std::tm> now;  // for strftime_now; nullopt: the local time
  RenderLimits limits;
};

// Trimming of text around tags; the defaults are those of transformers.
struct TemplateOptions {
  bool trim_blocks = true;    // remove a line break after a {% tag %}
  bool lstrip_blocks = true;  // remove spaces before a {% tag %} that begins its line
};

// A template, parsed once and rendered for many contexts.
class ChatTemplate {
 public:
  // Throws InputError("WHERE:LINE:COLUMN: ...") for a template that does not parse.
  ChatTemplate(std::string_view source, std::string where, TemplateOptions options = {});

  struct Rendered {
    std::string text;
    // Byte ranges [begin, end) printed by {% generation %} blocks: the model's own output. Blocks
    // inside a macro or a {% set %} block are not included.
    std::vector<std::pair<size_t, size_t>> generation_spans;
  };
  // `context` is an object of the variables. Throws InputError with line and column for any error,
  // including the template's raise_exception().
  Rendered render(const Json& context, const RenderOptions& options = {}) const;

  bool has_generation_blocks() const;

 private:
  std::string where_;
  std::shared_ptr<const jinja::Document> document_;
};

// Files of a model's folder that the two functions below read.
inline constexpr const char* kChatTemplateFiles[] = {"chat_template.jinja", "tokenizer_config.json",
                                                     "special_tokens_map.json"};

// The template of a folder: chat_template.jinja, else `chat_template` of tokenizer_config.json,
// which is a text or a list of {name, template}, where "tool_use" is used with tools, if there is
// one, and "default" otherwise. nullopt without one.
std::optional<std::string> find_chat_template(const NamedFiles& files);

// An object of texts: bos_token, eos_token etc. of tokenizer_config.json, which takes precedence,
// and special_tokens_map.json.
Json special_token_variables(const NamedFiles& files);

}  // namespace cohort
