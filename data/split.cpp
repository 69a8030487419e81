// FNV-1a over the bytes, then the splitmix64 finaliser: FNV alone mixes short texts badly into the
// high bits, which are the ones compared here.
#include "data/split.h"

#include <cstdint>

namespace cohort {

bool is_held_out(std::string_view prompt, double fraction) {
  uint64_t h = 0xcbf29ce484222325u;
  for (const char c : prompt) h = (h ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9u;
  h = (h ^ (h >> 27)) * 0x94d049bb133111ebu;
  h ^= h >> 31;
  return static_cast<double>(h >> 11) * 0x1p-53 < fraction;
}

}  // namespace cohort
