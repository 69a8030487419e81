// The held-out split as a property of a text (the prompt, or the fields of data.split_by), so that
// no seed, order or duplicate can move a problem into the other split.
#pragma once

#include <cstdint>
#include <string_view>

namespace cohort {

// FNV-1a of the text, mixed by splitmix64's finaliser. Equal on all platforms and in all versions.
uint64_t split_hash(std::string_view text);
// True if split_hash(), scaled to [0, 1), is below `fraction`: about that fraction of all texts.
bool is_held_out(uint64_t split_hash, double fraction);

inline bool is_held_out(std::string_view text, double fraction) {
  return is_held_out(split_hash(text), fraction);
}

}  // namespace cohort
