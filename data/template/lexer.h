// Tokens of a template, drawn one by one.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "data/chat_template.h"
#include "data/template/value.h"

namespace cohort::jinja {

enum class Tok : uint8_t {
  kEnd,
  kData,           // text: as it is to be printed
  kVariableBegin,  // {{
  kVariableEnd,
  kBlockBegin,  // {%
  kBlockEnd,
  kName,      // text
  kString,    // text: unescaped
  kNumber,    // value
  kOperator,  // text
};

struct Token {
  Tok type = Tok::kEnd;
  size_t at = 0;  // byte of the source
  std::string text;
  Value value;
};

class Lexer {
 public:
  // `source` has \n for line breaks and must outlive the lexer.
  Lexer(std::string_view source, TemplateOptions options) : source_(source), options_(options) {}
  // Throws Fault with its place.
  Token next();

 private:
  enum class State : uint8_t { kRoot, kVariable, kBlock };

  Token next_in_root();
  Token next_in_tag();
  bool skip_comment(size_t begin);
  bool take_raw(size_t begin, std::string& data);
  size_t match_end(size_t at, char sign_or_brace, bool plus) const;
  bool take_end(Token& token);
  Token take_number();
  Token take_string();
  Token take_operator();
  std::string_view trimmed(size_t begin, size_t end, char sign, bool is_variable) const;
  size_t skip_space(size_t at) const;
  size_t digits_end(size_t at, int base) const;
  size_t name_end(size_t at) const;
  char sign_at(size_t at) const;
  bool starts(size_t at, std::string_view text) const {
    return source_.substr(std::min(at, source_.size())).starts_with(text);
  }

  std::string_view source_;
  TemplateOptions options_;
  State state_ = State::kRoot;
  size_t at_ = 0;
  std::string open_;  // brackets of the tag that are not closed
  Token pending_;     // the begin of a tag, after the text before it
  bool has_pending_ = false;
};

}  // namespace cohort::jinja
