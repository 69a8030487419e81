// Tokens of a template.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "text/chat_template.h"
#include "text/jinja/value.h"

namespace cohort::jinja {

enum class Tok : uint8_t { kEnd, kData, kName, kConst, kOperator };  // {{ }} {% %} are operators

struct Token {
  Tok type = Tok::kEnd;
  size_t at = 0;          // byte offset in the source
  std::string_view text;  // a part of the source; kData: the text to print
  Value value;            // kConst only
};

// `source` has \n for line breaks and must outlive the tokens, as must `constants`, which owns the
// string literals with escapes. Throws TemplateError with its position.
std::vector<Token> lex(std::string_view source, TemplateOptions options, Heap& constants);

}  // namespace cohort::jinja
