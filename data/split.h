// The held-out split as a property of a text (the prompt, or the fields of data.split_by), so that
// no seed, order or duplicate can move a problem into the other split.
#pragma once

#include <cstdint>
#include <string_view>

namespace cohort {

// FNV-1a of the text, mixed by splitmix64's finaliser: FNV alone mixes short texts badly into the
// high bits, which decide the split. Equal on all platforms and in all versions.
inline uint64_t split_hash(std::string_view text) {
  uint64_t h = 0xcbf29ce484222325u;
  for (const char c : text) h = (h ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9u;
  h = (h ^ (h >> 27)) * 0x94d049bb133111ebu;
  return h ^ h >> 31;
}

// True if split_hash(), scaled to [0, 1), is below `fraction`: about that fraction of all texts.
inline bool is_held_out(uint64_t split_hash, double fraction) {
  return static_cast<double>(split_hash >> 11) * 0x1p-53 < fraction;
}

}  // namespace cohort
