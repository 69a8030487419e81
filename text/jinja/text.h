// Python's str methods, and values formatted as Python's libraries do.
#pragma once

#include <ctime>
#include <optional>
#include <string>
#include <string_view>

#include "text/jinja/value.h"
#include "text/utf8.h"

namespace cohort::jinja {

bool is_space(char32_t c);

std::u32string decode(std::string_view text);
// Byte offset of the character with this index; the size of the text if it is shorter.
size_t byte_of(std::string_view text, size_t characters);

std::string upper(std::string_view text);
std::string lower(std::string_view text);
std::string capitalize(std::string_view text);
// Every word with its first letter in upper case. title() is the method: words consist of letters.
// title_words() is the filter: words end at spaces, hyphens and opening brackets.
std::string title(std::string_view text);
std::string title_words(std::string_view text);

// Strips the characters of `chars` (nullopt: white space) from the ends of the text.
std::string_view strip(std::string_view text, Side side,
                       std::optional<std::string_view> chars = {});

struct Style {
  bool json = false, ascii = false, sort_keys = false;
  std::optional<std::string> indent;  // per level; nullopt: one line
  std::string_view item_separator = ", ", key_separator = ": ";
};
// Appends repr(), or json.dumps(). Throws TemplateError for values without a JSON form.
void write(Heap& heap, std::string& out, const Value& value, const Style& style, size_t level = 0);

// Appends str(); an undefined value appends nothing.
void print(Heap& heap, std::string& out, const Value& value);
std::string_view to_str(Heap& heap, const Value& value);

// time.strftime(), in English.
std::string format_time(std::tm time, std::string_view format);

}  // namespace cohort::jinja
