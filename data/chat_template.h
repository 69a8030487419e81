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

#include "data/file.h"
#include "data/json.h"

namespace cohort {

namespace jinja {
struct Document;
}

// What one rendering may use; more is an InputError.
struct RenderLimits {
  int64_t steps = 15'000'000;     // evaluated nodes, items passed over, and 16 bytes of values each
  int64_t text_bytes = 32 << 20;  // of one text, and of the output
  int depth = 600;                // nested evaluations: a macro that calls itself takes some each
};

struct RenderOptions {
  std::optional<std::tm> now;  // for strftime_now; nothing: the local time
  RenderLimits limits;
};

// How text around tags is trimmed; the default is that of transformers.
struct TemplateOptions {
  bool trim_blocks = true;    // a line break after a {% tag %} goes
  bool lstrip_blocks = true;  // spaces before a {% tag %} that begins its line go
};

// A template that is parsed once and rendered for many contexts.
class ChatTemplate {
 public:
  // Throws InputError("WHERE:LINE:COLUMN: ...") for a template that does not parse.
  ChatTemplate(std::string_view source, std::string where, TemplateOptions options = {});

  struct Rendered {
    std::string text;
    // The bytes [begin, end) that {% generation %} blocks have printed: what the model is to say.
    // Blocks inside a macro or a {% set %} block are not among them.
    std::vector<std::pair<size_t, size_t>> generation_spans;
  };
  // `context`: the variables, an object. Throws InputError with line and column for whatever goes
  // wrong, raise_exception() of the template included.
  Rendered render(const Json& context, const RenderOptions& options = {}) const;

  bool has_generation_blocks() const;

 private:
  std::string where_;
  std::shared_ptr<const jinja::Document> document_;
};

// The files of a model's folder that the two below look into.
inline constexpr const char* kChatTemplateFiles[] = {"chat_template.jinja", "tokenizer_config.json",
                                                     "special_tokens_map.json"};

// The template of a folder: chat_template.jinja, or `chat_template` of tokenizer_config.json, which
// is a text or a list of {name, template}, of which "default" counts. Nothing if it has none.
std::optional<std::string> find_chat_template(const NamedFiles& files);

// bos_token, eos_token and their like of special_tokens_map.json and tokenizer_config.json (which
// goes first): an object of texts.
Json special_token_variables(const NamedFiles& files);

}  // namespace cohort
