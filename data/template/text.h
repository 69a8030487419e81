// Characters of texts, as Python's str methods see them.
#pragma once

#include <optional>
#include <string>
#include <string_view>

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

}  // namespace cohort::jinja
