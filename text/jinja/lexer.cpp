// The lexer follows Jinja's rules for white space around tags: a sign next to the bracket, else
// trim_blocks and lstrip_blocks.
#include "text/jinja/lexer.h"

#include <algorithm>
#include <charconv>

#include "text/jinja/text.h"
#include "text/utf8.h"

namespace cohort::jinja {
namespace {

// Bounds the time and memory of parsing; real templates have some thousands of tokens.
constexpr size_t kMaxTokens = 200'000;

// Longer ones first.
constexpr std::string_view kOperatorTokens[] = {"//", "==", "!=", ">=", "<=", "+", "-", "/",
                                                "*",  "%",  "~",  "[",  "]",  "(", ")", "{",
                                                "}",  ">",  "<",  "=",  ".",  ":", "|", ","};
// Escapes of string literals: pairs of the letter and its character.
constexpr std::string_view kEscapes = "\\\\''\"\"a\ab\bf\fn\nr\rt\tv\v";

class Lexer {
 public:
  Lexer(std::string_view source, TemplateOptions options, Heap& constants)
      : source_(source), options_(options), constants_(constants) {}

  std::vector<Token> take() {
    while (true) {
      size_t tag = source_.find('{', at_);
      while (tag < source_.size() && std::string_view("%{#").find(peek(tag + 1)) == source_.npos)
        tag = source_.find('{', tag + 1);
      push_data(std::min(tag, source_.size()));
      if (at_ == source_.size()) break;
      if (starts(at_, "{#"))
        skip_comment();
      else if (skip_tag("raw", Trim::kNo))
        take_raw();
      else
        take_tag();
    }
    push(Tok::kEnd, 0);
    return std::move(tokens_);
  }

 private:
  enum class Trim : bool { kNo, kYes };

  char peek(size_t at) const { return at < source_.size() ? source_[at] : '\0'; }
  bool starts(size_t at, std::string_view text) const {
    return source_.substr(std::min(at, source_.size())).starts_with(text);
  }
  bool has_sign(size_t at) const { return peek(at) == '-' || peek(at) == '+'; }
  size_t end_of_space(size_t at) const {
    return source_.size() - strip(source_.substr(at), Side::kLeft).size();
  }
  static bool is_digit(char c) { return c >= '0' && c <= '9'; }
  static bool is_name(char c) {
    return c == '_' || is_digit(c) || ((c | 32) >= 'a' && (c | 32) <= 'z');
  }

  // Appends a token of the next `size` bytes.
  void push(Tok type, size_t size, Value value = {}) {
    if (tokens_.size() >= kMaxTokens)
      throw TemplateError(str("the template has more than ", kMaxTokens, " tokens"), at_);
    tokens_.push_back({type, at_, source_.substr(at_, size), value});
    at_ += size;
  }

  // Appends the text up to a tag, or to the end of the template.
  void push_data(size_t end) {
    const size_t begin = at_;
    std::string_view text = source_.substr(begin, end - begin);
    if (peek(end + 2) == '-') {
      text = strip(text, Side::kRight);
    } else if (options_.lstrip_blocks && peek(end + 2) != '+' && !starts(end, "{{") &&
               end < source_.size()) {
      const size_t line = text.rfind('\n') + 1;  // 0 if there is none
      const bool starts_line = line > 0 || begin == 0 || source_[begin - 1] == '\n';
      if (starts_line && strip(text.substr(line), Side::kRight).empty())
        text = text.substr(0, line);
    }
    if (!text.empty()) push(Tok::kData, text.size());
    at_ = end;
  }

  // Skips the end of a tag at this position, with its sign and the white space it trims.
  bool skip_end(std::string_view end, Trim trim) {
    const char sign = has_sign(at_) ? peek(at_) : '\0';
    const size_t at = at_ + (sign != '\0');
    if (!starts(at, end) || (sign == '+' && end == "}}")) return false;
    at_ = at + 2;
    if (sign == '-') at_ = end_of_space(at_);
    if (sign == '\0' && trim == Trim::kYes && options_.trim_blocks && peek(at_) == '\n') ++at_;
    return true;
  }

  void skip_comment() {
    const size_t inside = at_ + 2 + has_sign(at_ + 2), end = source_.find("#}", inside);
    if (end == source_.npos) throw TemplateError("missing end of comment: '#}'", at_);
    at_ = end - (end > inside && has_sign(end - 1));
    skip_end("#}", Trim::kYes);
  }

  // Skips {% NAME %} at this position.
  bool skip_tag(std::string_view name, Trim trim) {
    const size_t begin = at_,
                 at = end_of_space(std::min(begin + 2 + has_sign(begin + 2), source_.size()));
    if (starts(begin, "{%") && starts(at, name)) {
      at_ = end_of_space(at + name.size());
      if (skip_end("%}", trim)) return true;
    }
    at_ = begin;
    return false;
  }

  void take_raw() {
    const size_t begin = at_;
    for (size_t tag = begin; (tag = source_.find("{%", tag)) != source_.npos; ++tag) {
      at_ = tag;
      if (!skip_tag("endraw", Trim::kYes)) continue;
      const size_t end = std::exchange(at_, begin);
      push_data(tag);
      at_ = end;
      return;
    }
    throw TemplateError("{% raw %} without {% endraw %}", begin);
  }

  void take_tag() {
    const std::string_view end = peek(at_ + 1) == '%' ? "%}" : "}}";
    int open = 0;  // brackets
    push(Tok::kOperator, 2);
    at_ += has_sign(at_);
    while ((at_ = end_of_space(at_)) < source_.size()) {
      const size_t at = at_;
      if (open == 0 && skip_end(end, end == "%}" ? Trim::kYes : Trim::kNo)) {
        tokens_.push_back({Tok::kOperator, at, end, {}});
        return;
      }
      const char c = peek(at);
      if (is_digit(c)) {
        take_number();
      } else if (c == '\'' || c == '"') {
        take_string();
      } else if (is_name(c)) {
        size_t name = at;
        while (is_name(peek(name))) ++name;
        push(Tok::kName, name - at);
      } else {
        open += c == '(' || c == '[' || c == '{' ? 1 : c == ')' || c == ']' || c == '}' ? -1 : 0;
        take_operator();
      }
    }
  }

  void take_operator() {
    const auto* op = std::ranges::find_if(kOperatorTokens, [&](auto o) { return starts(at_, o); });
    if (op == std::end(kOperatorTokens))
      throw TemplateError(
          "unexpected character " + describe_character(decode_utf8(source_, at_).code), at_);
    push(Tok::kOperator, op->size());
  }

  void take_number() {
    const char *const begin = source_.data() + at_, *const end = source_.data() + source_.size();
    int64_t integer = 0;
    double number = 0;
    auto result = std::from_chars(begin, end, integer);
    const auto after = at_ + static_cast<size_t>(result.ptr - begin);
    // a.0.1 is two subscripts, not the number 0.1.
    const bool is_float =
        source_[at_ - 1] != '.' &&
        ((peek(after) == '.' && is_digit(peek(after + 1))) || (peek(after) | 32) == 'e');
    if (is_float) result = std::from_chars(begin, end, number);
    if (result.ec != std::errc()) throw TemplateError("a number is too large", at_);
    push(Tok::kConst, static_cast<size_t>(result.ptr - begin),
         is_float ? Value(number) : Value(integer));
  }

  void take_string() {
    size_t end = at_ + 1;
    while (end < source_.size() && source_[end] != source_[at_])
      end += source_[end] == '\\' ? 2 : 1;
    if (end >= source_.size()) throw TemplateError("unterminated string", at_);
    const std::string_view text = source_.substr(at_ + 1, end - at_ - 1);
    const bool as_it_is = text.find('\\') == text.npos;
    push(Tok::kConst, end + 1 - at_, as_it_is ? Value(text) : constants_.text(unescaped(text)));
  }

  // Resolves Python's escapes in a string literal, except octal and named ones.
  std::string unescaped(std::string_view text) const {
    std::string out;
    for (size_t at = 0; at < text.size();) {
      if (text[at] != '\\') {
        out += text[at++];
        continue;
      }
      const char c = text[at + 1];
      const size_t known = kEscapes.find(c);
      const size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
      at += 2;
      if (known != kEscapes.npos && known % 2 == 0) {
        out += kEscapes[known + 1];
      } else if (digits > 0) {
        const std::string_view hex = text.substr(at, digits);
        uint32_t code = 0;
        const auto result = std::from_chars(hex.data(), hex.data() + hex.size(), code, 16);
        if (result.ptr != hex.data() + digits || code > 0x10ffff ||
            (code >= 0xd800 && code < 0xe000))
          throw TemplateError("a string has an escape that is not a character", at_);
        out += encode_utf8(code);
        at += digits;
      } else if (c != '\n') {
        out += {'\\', c};
      }
    }
    return out;
  }

  std::string_view source_;
  TemplateOptions options_;
  Heap& constants_;
  size_t at_ = 0;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> lex(std::string_view source, TemplateOptions options, Heap& constants) {
  return Lexer(source, options, constants).take();
}

}  // namespace cohort::jinja
