// Which problems are held out: a property of a text (the prompt, or the fields of data.split_by),
// so that no seed, order or duplicate can carry a problem across the border.
#pragma once

#include <cstdint>
#include <string_view>

namespace cohort {

// FNV-1a of the text, mixed by splitmix64's finaliser. The same on every platform and in every
// version.
uint64_t split_hash(std::string_view text);
// True for about `fraction` of all texts: those whose split_hash(), seen as a number in [0, 1), is
// below it.
bool is_held_out(uint64_t split_hash, double fraction);

inline bool is_held_out(std::string_view text, double fraction) {
  return is_held_out(split_hash(text), fraction);
}

}  // namespace cohort
