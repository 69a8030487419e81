// Texts as Python's str methods see them, and values as texts in the formats of Python's libraries.
#pragma once

#include <ctime>
#include <optional>
#include <string>
#include <string_view>

#include "data/template/value.h"

namespace cohort::jinja {

bool is_space(char32_t c);
bool is_printable(char32_t c);

std::u32string decode(std::string_view text);
size_t count_characters(std::string_view text);
// The byte after so many characters; the end if there are fewer.
size_t byte_of(std::string_view text, size_t characters);

std::string upper(std::string_view text);
std::string lower(std::string_view text);
std::string capitalize(std::string_view text);
// Every word with its first letter in upper case. The words of the method are letters; those of the
// filter end at spaces and opening brackets.
std::string title(std::string_view text);
std::string title_words(std::string_view text);

enum class Side { kLeft, kRight, kBoth };
// Without the characters of `chars` (nothing: white space) at its ends.
std::string_view strip(std::string_view text, Side side,
                       std::optional<std::string_view> chars = {});

struct Style {
  bool json = false, ascii = false, sort_keys = false;
  std::optional<std::string> indent;  // of one level; nothing: all on one line
  std::string_view item_separator = ", ", key_separator = ": ";
};
// Appends repr(), or json.dumps(). Throws Fault for what JSON does not have.
void write(Heap& heap, std::string& out, const Value& value, const Style& style, size_t level = 0);

// Appends str(). Nothing for an undefined value.
void print(Heap& heap, std::string& out, const Value& value);
std::string_view to_str(Heap& heap, const Value& value);

// time.strftime(), in English.
std::string format_time(std::tm time, std::string_view format);

}  // namespace cohort::jinja
