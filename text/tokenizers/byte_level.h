// GPT-2's alphabet: a printable character for each of the 256 bytes.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace cohort {

// Maps the bytes of a text to their characters.
std::string to_byte_characters(std::string_view text);
// Maps characters back to bytes; nullopt if the text contains another character.
std::optional<std::string> from_byte_characters(std::string_view text);

// The token of a byte in other alphabets: "<0x00>" to "<0xFF>".
std::string byte_token(char byte);

}  // namespace cohort
