// Chat templates: the engine of text/jinja/ behind one class, and the lookup in a folder.
#include "text/chat_template.h"

#include <algorithm>

#include "text/jinja/interpreter.h"
#include "text/tokenizers/json_fields.h"
#include "text/utf8.h"

namespace cohort {
namespace {

constexpr size_t kMaxSource = 16 << 20;

// "WHERE:LINE:COLUMN: message" for a byte of the source; columns count characters.
[[noreturn]] void fail(const std::string& where, std::string_view source, size_t at,
                       const std::string& message) {
  const std::string_view before = source.substr(0, std::min(at, source.size()));
  const auto line = 1 + std::count(before.begin(), before.end(), '\n');
  const size_t column = 1 + count_characters(before.substr(before.rfind('\n') + 1));
  throw InputError(str(where, ":", line, ":", column, ": ", message));
}

// Converts line breaks to \n, and removes one at the end.
std::string normalize_lines(std::string_view source) {
  std::string out;
  for (size_t at = 0; at < source.size(); ++at) {
    out += source[at] == '\r' ? '\n' : source[at];
    if (source.substr(at).starts_with("\r\n")) ++at;
  }
  if (out.ends_with('\n')) out.pop_back();
  return out;
}

}  // namespace

ChatTemplate::ChatTemplate(std::string_view source, std::string where, TemplateOptions options)
    : where_(std::move(where)) {
  if (source.size() > kMaxSource)
    throw InputError(str(where_, ": the template is longer than ", kMaxSource, " bytes"));
  auto document = std::make_shared<jinja::Document>();
  document->source = normalize_lines(source);
  if (const size_t at = utf8_prefix(document->source); at < document->source.size())
    fail(where_, document->source, at, "the template is not UTF-8");
  try {
    jinja::parse(*document, options);
  } catch (const jinja::TemplateError& error) {
    fail(where_, document->source, error.at, error.what());
  }
  document_ = std::move(document);
}

ChatTemplate::Rendered ChatTemplate::render(const Json& context,
                                            const RenderOptions& options) const {
  if (!context.is_object())
    throw InputError(where_ + ": the variables of a template are an object");
  jinja::Interpreter interpreter(options);
  try {
    return interpreter.render(*document_, context);
  } catch (const jinja::TemplateError& error) {
    fail(where_, document_->source, error.at, error.what());
  }
}

bool ChatTemplate::has_generation_blocks() const {
  return document_->has_generation_blocks;
}

std::optional<std::string> find_chat_template(const NamedFiles& files) {
  if (const std::string* text = find_file(files, "chat_template.jinja")) return *text;
  const Json json = read_object(files, "tokenizer_config.json", "tokenizer_config.json");
  const Json& found = json.get_or_null("chat_template");
  if (found.is_null()) return {};
  if (found.is_string()) return found.as_string();
  Json named = Json::Object{};
  if (found.is_array())
    for (const Json& entry : found.as_array())
      if (const std::string* name = entry.find_text("name"))
        named.set(*name, entry.get_or_null("template"));
  const std::string *plain = named.find_text("default"), *tool_use = named.find_text("tool_use");
  if (plain != nullptr && tool_use != nullptr)
    return str("{% if tools is defined and tools is not none %}\n", normalize_lines(*tool_use),
               "{%+ else %}\n", normalize_lines(*plain), "{%+ endif %}");
  if (plain != nullptr) return *plain;
  throw InputError(
      "tokenizer_config.json: 'chat_template' is neither a text nor a list with a template "
      "'default'");
}

Json special_token_variables(const NamedFiles& files) {
  Json variables{Json::Object{}};
  for (const char* file : {"special_tokens_map.json", "tokenizer_config.json"}) {
    const Json json = read_object(files, file, file);
    for (const auto& [name, value] : json.as_object()) {
      const Json& text = value.is_object() ? value.get_or_null("content") : value;
      if (name.ends_with("_token") && text.is_string()) variables.set(name, text);
    }
  }
  return variables;
}

}  // namespace cohort
