// GPT-2's alphabet: a printable character for each of the 256 bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace cohort {

// The characters for the bytes of a text.
std::string to_byte_characters(std::string_view text);
// The bytes of a text made of these characters only; nothing if it holds another one.
std::optional<std::string> from_byte_characters(std::string_view text);

}  // namespace cohort
