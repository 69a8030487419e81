// Byte pair encoding (Sennrich et al., 2016): adjacent tokens are merged in the order of a list.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "text/tokenizers/model.h"

namespace cohort {

// The merges of pairs of adjacent ids.
class MergeTable {
 public:
  static constexpr uint32_t kNoMerge = UINT32_MAX;
  struct Merge {
    uint32_t rank = kNoMerge;  // earlier merges have lower ranks
    int32_t id = -1;
  };

  void reserve(size_t merges);
  void set(int32_t left, int32_t right, Merge merge);  // overwrites an earlier one
  Merge find(int32_t left, int32_t right) const {
    if (slots_.empty()) return {};
    const uint64_t key = key_of(left, right);
    for (size_t slot = slot_of(key);; slot = (slot + 1) & (slots_.size() - 1)) {
      if (slots_[slot].key == key) return slots_[slot].merge;
      if (slots_[slot].key == kFree) return {};
    }
  }

 private:
  static constexpr uint64_t kFree = UINT64_MAX;
  struct Slot {
    uint64_t key = kFree;
    Merge merge;
  };
  static uint64_t key_of(int32_t left, int32_t right) {
    return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
  }
  size_t slot_of(uint64_t key) const {
    return static_cast<size_t>((key * 0x9e3779b97f4a7c15u) >> 32) & (slots_.size() - 1);
  }

  std::vector<Slot> slots_;  // a power of two, at most half full
};

// Merges the word ids[begin:] in place, lowest rank first and of equal ranks the leftmost, in
// O(n log n). Resizes `ids` to the result.
void merge_all(const MergeTable& merges, std::vector<int32_t>& ids, size_t begin);

// Some exports turn the no-break spaces of Llama 2's tokens into spaces. Merges written as "a b"
// show it: a second space is otherwise impossible there. The spaces of the tokens then stand for
// no-break spaces.
bool has_lost_spaces(const Json& merge);
std::string with_no_break_spaces(const std::string& token);

std::unique_ptr<Model> make_bpe(const Json& json, WordText words, Vocabulary& vocabulary);

}  // namespace cohort
