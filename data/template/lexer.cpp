// The lexer follows Jinja's rules of white space around tags: a sign beside the bracket, and
// trim_blocks and lstrip_blocks where there is none.
#include "data/template/lexer.h"

#include <algorithm>
#include <charconv>

#include "data/template/text.h"
#include "data/utf8.h"

namespace cohort::jinja {
namespace {

// Real templates have some thousands. Bounds what parsing takes.
constexpr size_t kMaxTokens = 200'000;

// Longer ones first.
constexpr std::string_view kOperators[] = {"//", "**", "==", "!=", ">=", "<=", "+", "-", "/",
                                           "*",  "%",  "~",  "[",  "]",  "(",  ")", "{", "}",
                                           ">",  "<",  "=",  ".",  ":",  "|",  ","};
constexpr std::string_view kBrackets = "()[]{}";
// Escapes of string literals: the letter, and the character it stands for.
constexpr std::string_view kEscapes = "\\\\''\"\"a\ab\bf\fn\nr\rt\tv\v";

class Lexer {
 public:
  Lexer(std::string_view source, TemplateOptions options) : source_(source), options_(options) {}

  std::vector<Token> take() {
    while (at_ < source_.size()) {
      size_t tag = source_.find('{', at_);
      while (tag < source_.size() &&
             std::string_view("%{#").find(peek(tag + 1)) == std::string::npos)
        tag = source_.find('{', tag + 1);
      tag = std::min(tag, source_.size());
      push_data(at_, tag);
      at_ = tag;
      if (tag == source_.size()) break;
      if (starts(tag, "{#"))
        skip_comment();
      else if (const size_t raw = take_named("raw", Trim::kNo); raw != tag)
        take_raw(raw);
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
  // The end of the characters that are of a kind.
  size_t end_of(size_t at, bool (*kind)(char32_t)) const {
    for (Utf8Char c = decode_utf8(source_, at); c.size > 0 && kind(c.code);
         c = decode_utf8(source_, at))
      at += c.size;
    return at;
  }

  // The next `size` bytes.
  void push(Tok type, size_t size, Value value = {}) {
    if (tokens_.size() >= kMaxTokens)
      throw Fault(str("a template of more than ", kMaxTokens, " tokens"), at_);
    tokens_.push_back({type, at_, source_.substr(at_, size), std::move(value)});
    at_ += size;
  }

  // The text up to a tag, or to the end.
  void push_data(size_t begin, size_t end) {
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
    if (text.empty()) return;
    at_ = begin;
    push(Tok::kData, text.size());
  }

  // Passes the end of a tag with its sign and the space that goes with it, if it stands here.
  bool skip_end(std::string_view end, Trim trim) {
    const char sign = has_sign(at_) ? peek(at_) : '\0';
    const size_t at = at_ + (sign != '\0');
    if (!starts(at, end) || (sign == '+' && end == "}}")) return false;
    at_ = at + 2;
    if (sign == '-') at_ = end_of(at_, is_space);
    if (sign == '\0' && trim == Trim::kYes && options_.trim_blocks && peek(at_) == '\n') ++at_;
    return true;
  }

  void skip_comment() {
    const size_t inside = at_ + 2 + has_sign(at_ + 2), end = source_.find("#}", inside);
    if (end == source_.npos) throw Fault("a comment has no end: '#}'", at_);
    at_ = end - (end > inside && has_sign(end - 1));
    skip_end("#}", Trim::kYes);
  }

  // Passes {% NAME %} if it stands here, and returns where it ends.
  size_t take_named(std::string_view name, Trim trim) {
    const size_t begin = at_;
    at_ = end_of(begin + 2 + has_sign(begin + 2), is_space);
    if (starts(begin, "{%") && starts(at_, name)) {
      at_ = end_of(at_ + name.size(), is_space);
      if (skip_end("%}", trim)) return at_;
    }
    return at_ = begin;
  }

  void take_raw(size_t begin) {
    while ((at_ = source_.find("{%", at_)) != source_.npos) {
      const size_t tag = at_, end = take_named("endraw", Trim::kYes);
      if (end != tag) {
        push_data(begin, tag);
        at_ = end;
        return;
      }
      ++at_;
    }
    throw Fault("{% raw %} has no {% endraw %}", begin);
  }

  void take_tag() {
    const std::string_view end = peek(at_ + 1) == '%' ? "%}" : "}}";
    push(Tok::kOperator, 2);
    at_ += has_sign(at_);
    std::string open;  // what closes the brackets
    while ((at_ = end_of(at_, is_space)) < source_.size()) {
      const size_t at = at_;
      if (open.empty() && skip_end(end, end == "%}" ? Trim::kYes : Trim::kNo)) {
        tokens_.push_back({Tok::kOperator, at, end, {}});
        return;
      }
      const char c = source_[at_];
      if (is_digit(static_cast<unsigned char>(c)))
        take_number();
      else if (c == '\'' || c == '"')
        take_string();
      else if (const size_t name = end_of(at_, is_name); name > at_)
        push(Tok::kName, name - at_);
      else
        take_operator(open);
    }
  }

  static bool is_name(char32_t c) { return is_alpha(c) || is_digit(c) || c == '_'; }

  void take_operator(std::string& open) {
    const auto* op = std::find_if(std::begin(kOperators), std::end(kOperators),
                                  [&](std::string_view o) { return starts(at_, o); });
    if (op == std::end(kOperators))
      throw Fault("unexpected character " + describe_character(decode_utf8(source_, at_).code),
                  at_);
    const size_t bracket = kBrackets.find(*op);
    if (bracket != kBrackets.npos && bracket % 2 == 0) {
      open += kBrackets[bracket + 1];
    } else if (bracket != kBrackets.npos) {
      if (open.empty() || open.back() != source_[at_])
        throw Fault(str("unexpected '", *op, "'"), at_);
      open.pop_back();
    }
    push(Tok::kOperator, op->size());
  }

  void take_number() {
    const auto digits = [&](size_t at) {
      return end_of(at, [](char32_t c) { return is_digit(c) || c == '_'; });
    };
    size_t end = digits(at_);
    const bool is_hex = end == at_ + 1 && starts(at_, "0x");
    if (is_hex) end = end_of(at_ + 2, is_name);
    bool is_float = false;
    if (!is_hex && peek(end) == '.' && is_digit(peek(end + 1)) && peek(at_ - 1) != '.')
      is_float = true, end = digits(end + 1);
    const size_t exponent = end + 1 + has_sign(end + 1);
    if (!is_hex && (peek(end) | 32) == 'e' && is_digit(peek(exponent)))
      is_float = true, end = digits(exponent);
    std::string text(source_.substr(at_, end - at_));
    std::erase(text, '_');
    const char *first = text.data() + (is_hex ? 2 : 0), *last = text.data() + text.size();
    double number = 0;
    int64_t whole = 0;
    const auto result = is_float ? std::from_chars(first, last, number)
                                 : std::from_chars(first, last, whole, is_hex ? 16 : 10);
    if (result.ec != std::errc() || result.ptr != last)
      throw Fault("a number is too large, or none", at_);
    push(Tok::kConst, end - at_, is_float ? Value(number) : Value(whole));
  }

  void take_string() {
    size_t end = at_ + 1;
    while (end < source_.size() && source_[end] != source_[at_])
      end += source_[end] == '\\' ? 2 : 1;
    if (end >= source_.size()) throw Fault("a string has no end", at_);
    std::string text = unescaped(source_.substr(at_ + 1, end - at_ - 1));
    push(Tok::kConst, end + 1 - at_,
         std::make_shared<const Text>(std::move(text), Markup::kNo, nullptr));
  }

  // What a literal between quotes stands for: the escapes of Python, but for octal ones and names.
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
        if (result.ec != std::errc() || result.ptr != hex.data() + digits || code > 0x10ffff ||
            (code >= 0xd800 && code < 0xe000))
          throw Fault("a string has an escape that stands for no character", at_);
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
  size_t at_ = 0;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> lex(std::string_view source, TemplateOptions options) {
  return Lexer(source, options).take();
}

}  // namespace cohort::jinja
