// The lexer follows Jinja's rules of white space around tags: a sign beside the bracket, and
// trim_blocks and lstrip_blocks where there is none.
#include "data/template/lexer.h"

#include <algorithm>
#include <charconv>

#include "data/template/text.h"
#include "data/utf8.h"

namespace cohort::jinja {
namespace {

// Longer ones first.
constexpr std::string_view kOperators[] = {"//", "**", "==", "!=", ">=", "<=", "+", "-", "/",
                                           "*",  "%",  "~",  "[",  "]",  "(",  ")", "{", "}",
                                           ">",  "<",  "=",  ".",  ":",  "|",  ",", ";"};

std::string without_underscores(std::string_view digits) {
  std::string out(digits);
  std::erase(out, '_');
  return out;
}

// Escapes of string literals that stand for one character.
constexpr std::string_view kEscapes = "\\\\''\"\"a\ab\bf\fn\nr\rt\tv\v";

char32_t take_code(std::string_view text, size_t& at, size_t size, int base, size_t place) {
  uint32_t code = 0;
  const char* begin = text.data() + at;
  const char* end = begin + std::min(size, text.size() - at);
  const auto result = std::from_chars(begin, end, code, base);
  const bool whole = base == 8 || result.ptr == begin + size;
  if (result.ec != std::errc() || !whole || code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
    throw Fault("a string has an escape that stands for no character", place);
  at += static_cast<size_t>(result.ptr - begin);
  return code;
}

// What a literal between quotes stands for: the escapes of Python.
std::string unescape(std::string_view text, size_t place) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t slash = std::min(text.find('\\', at), text.size());
    out += text.substr(at, slash - at);
    at = slash + 1;
    if (at >= text.size()) break;
    const char c = text[at++];
    const size_t known = kEscapes.find(c);
    if (c == '\n') continue;
    if (known != kEscapes.npos && known % 2 == 0) {
      out += kEscapes[known + 1];
    } else if (c == 'x' || c == 'u' || c == 'U') {
      out += encode_utf8(take_code(text, at, c == 'x' ? 2 : c == 'u' ? 4 : 8, 16, place));
    } else if (c >= '0' && c <= '7') {
      out += encode_utf8(take_code(text, --at, 3, 8, place));
    } else if (c == 'N') {
      throw Fault("a string has a \\N{...} escape, which is not supported", place);
    } else {
      out += '\\';
      out += c;
    }
  }
  return out;
}

}  // namespace

size_t Lexer::skip_space(size_t at) const {
  while (at < source_.size()) {
    const Utf8Char c = decode_utf8(source_, at);
    if (c.size == 0 || !is_space(c.code)) break;
    at += c.size;
  }
  return at;
}

char Lexer::sign_at(size_t at) const {
  return at < source_.size() && (source_[at] == '-' || source_[at] == '+') ? source_[at] : 0;
}

// The text before a tag.
std::string_view Lexer::trimmed(size_t begin, size_t end, char sign, bool is_variable) const {
  const std::string_view text = source_.substr(begin, end - begin);
  if (sign == '-') return strip(text, Side::kRight);
  if (sign == '+' || !options_.lstrip_blocks || is_variable) return text;
  const size_t line = text.rfind('\n') + 1;  // 0 if there is none
  const bool starts_line = line > 0 || begin == 0 || source_[begin - 1] == '\n';
  const bool blank = strip(text.substr(line), Side::kRight).empty();
  return starts_line && blank ? text.substr(0, line) : text;
}

// The byte after the end of a tag ("%}", "}}" or "#}") at `at`, with its sign and the space that
// goes with it; npos if there is none.
size_t Lexer::match_end(size_t at, char brace, bool plus) const {
  const std::string end = {brace, '}'};
  if (const char sign = sign_at(at); sign != 0 && starts(at + 1, end))
    return sign == '-' ? skip_space(at + 3) : plus ? at + 3 : source_.npos;
  if (!starts(at, end)) return source_.npos;
  at += 2;
  return brace != '}' && options_.trim_blocks && starts(at, "\n") ? at + 1 : at;
}

// Passes a comment whose text starts at `begin`.
bool Lexer::skip_comment(size_t begin) {
  const size_t end = source_.find("#}", begin);
  if (end == source_.npos) return false;
  at_ = match_end(end > begin && sign_at(end - 1) != 0 ? end - 1 : end, '#', true);
  return true;
}

// Passes {% raw %} to {% endraw %}, where the inside of the first tag starts at `begin`.
bool Lexer::take_raw(size_t begin, std::string& data) {
  const size_t word = skip_space(begin);
  if (!starts(word, "raw")) return false;
  const size_t after = skip_space(word + 3);
  const bool minus = starts(after, "-%}");
  if (!minus && !starts(after, "%}")) return false;
  const size_t text = minus ? skip_space(after + 3) : after + 2;
  for (size_t tag = source_.find("{%", text); tag != source_.npos;
       tag = source_.find("{%", tag + 1)) {
    const char sign = sign_at(tag + 2);
    const size_t name = skip_space(tag + 2 + (sign != 0));
    if (!starts(name, "endraw")) continue;
    const size_t end = match_end(skip_space(name + 6), '%', true);
    if (end == source_.npos) continue;
    data = trimmed(text, tag, sign, false);
    at_ = end;
    return true;
  }
  throw Fault("{% raw %} has no {% endraw %}", begin);
}

Token Lexer::next_in_root() {
  const size_t begin = at_;
  size_t tag = source_.find('{', at_);
  while (tag != source_.npos &&
         !(tag + 1 < source_.size() &&
           (source_[tag + 1] == '%' || source_[tag + 1] == '{' || source_[tag + 1] == '#')))
    tag = source_.find('{', tag + 1);
  if (tag == source_.npos) {
    at_ = source_.size();
    if (begin == at_) return {Tok::kEnd, begin};
    return {Tok::kData, begin, std::string(source_.substr(begin))};
  }
  const char kind = source_[tag + 1], sign = sign_at(tag + 2);
  const size_t inside = tag + 2 + (sign != 0);
  Token data{Tok::kData, begin, std::string(trimmed(begin, tag, sign, kind == '{'))};
  if (kind == '#') {
    if (!skip_comment(inside)) throw Fault("a comment has no end: '#}'", tag);
    return data;
  }
  std::string raw;
  if (kind == '%' && take_raw(inside, raw)) {
    data.text += raw;
    return data;
  }
  at_ = inside;
  state_ = kind == '%' ? State::kBlock : State::kVariable;
  pending_ = {kind == '%' ? Tok::kBlockBegin : Tok::kVariableBegin, tag};
  has_pending_ = true;
  return data;
}

bool Lexer::take_end(Token& token) {
  const bool block = state_ == State::kBlock;
  const size_t end = open_.empty() ? match_end(at_, block ? '%' : '}', block) : source_.npos;
  if (end == source_.npos) return false;
  token = {block ? Tok::kBlockEnd : Tok::kVariableEnd, at_};
  state_ = State::kRoot;
  at_ = end;
  return true;
}

// The end of digits with single underscores between them; `at` if there is none.
size_t Lexer::digits_end(size_t at, int base) const {
  const auto is_digit_at = [&](size_t i) {
    if (i >= source_.size()) return false;
    int digit = 0;
    return std::from_chars(&source_[i], &source_[i] + 1, digit, base).ec == std::errc();
  };
  while (is_digit_at(at) ||
         (at > 0 && source_.substr(at, 1) == "_" && is_digit_at(at - 1) && is_digit_at(at + 1)))
    ++at;
  return at;
}

Token Lexer::take_number() {
  Token token{Tok::kNumber, at_};
  const auto fraction = [&](size_t at) {
    const size_t end = starts(at, ".") ? digits_end(at + 1, 10) : at;
    return end > at + 1 ? end : at;
  };
  const size_t whole = digits_end(at_, 10), after = fraction(whole);
  size_t end = after;
  if (starts(after, "e") || starts(after, "E")) {
    const size_t digits = after + 1 + (sign_at(after + 1) != 0);
    if (digits_end(digits, 10) > digits) end = digits_end(digits, 10);
  }
  const auto check = [&](const std::from_chars_result& result) {
    if (result.ec != std::errc()) throw Fault("a number is too large", at_);
  };
  if (end > whole && (at_ == 0 || source_[at_ - 1] != '.')) {
    const std::string digits = without_underscores(source_.substr(at_, end - at_));
    double value = 0;
    check(std::from_chars(digits.data(), digits.data() + digits.size(), value));
    token.value = Value(value);
  } else {
    const char prefix = starts(at_, "0") && at_ + 1 < source_.size() ? source_[at_ + 1] | 32 : 0;
    int base = prefix == 'x' ? 16 : prefix == 'o' ? 8 : prefix == 'b' ? 2 : 10;
    if (base != 10 && digits_end(at_ + 2, base) == at_ + 2) base = 10;
    const size_t begin = at_ + (base == 10 ? 0 : 2);
    end = digits_end(begin, base);
    // A zero starts no other number than zero.
    if (base == 10 && source_[at_] == '0')
      end = std::min(source_.find_first_not_of("0_", at_), end);
    const std::string digits = without_underscores(source_.substr(begin, end - begin));
    int64_t value = 0;
    check(std::from_chars(digits.data(), digits.data() + digits.size(), value, base));
    token.value = Value(value);
  }
  at_ = end;
  return token;
}

Token Lexer::take_string() {
  size_t end = at_ + 1;
  while (end < source_.size() && source_[end] != source_[at_]) end += source_[end] == '\\' ? 2 : 1;
  if (end >= source_.size()) throw Fault("a string has no end", at_);
  Token token{Tok::kString, at_, unescape(source_.substr(at_ + 1, end - at_ - 1), at_)};
  at_ = end + 1;
  return token;
}

Token Lexer::take_operator() {
  const auto* op = std::find_if(std::begin(kOperators), std::end(kOperators),
                                [&](std::string_view o) { return starts(at_, o); });
  if (op == std::end(kOperators))
    throw Fault("unexpected character " + describe_character(decode_utf8(source_, at_).code), at_);
  Token token{Tok::kOperator, at_, std::string(*op)};
  constexpr std::string_view kBrackets = "()[]{}";
  if (const size_t bracket = kBrackets.find(*op); bracket != kBrackets.npos) {
    if (bracket % 2 == 0) {
      open_ += kBrackets[bracket + 1];
    } else {
      if (open_.empty() || open_.back() != (*op)[0])
        throw Fault(str("unexpected '", *op, "'"), at_);
      open_.pop_back();
    }
  }
  at_ += op->size();
  return token;
}

size_t Lexer::name_end(size_t at) const {
  while (at < source_.size()) {
    const Utf8Char c = decode_utf8(source_, at);
    if (!is_alpha(c.code) && !is_digit(c.code) && c.code != '_') break;
    at += c.size;
  }
  return at;
}

Token Lexer::next_in_tag() {
  Token token;
  if (take_end(token)) return token;
  at_ = skip_space(at_);
  if (take_end(token)) return token;
  if (at_ >= source_.size()) return {Tok::kEnd, at_};
  const char c = source_[at_];
  if (is_digit(static_cast<unsigned char>(c))) return take_number();
  if (c == '\'' || c == '"') return take_string();
  const size_t end = name_end(at_);
  if (end == at_) return take_operator();
  token = {Tok::kName, at_, std::string(source_.substr(at_, end - at_))};
  at_ = end;
  return token;
}

Token Lexer::next() {
  if (has_pending_) {
    has_pending_ = false;
    return std::move(pending_);
  }
  return state_ == State::kRoot ? next_in_root() : next_in_tag();
}

}  // namespace cohort::jinja
