// Byte pair encoding (Sennrich et al., 2016): neighbours are merged in the order of a list.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "data/tokenizers/model.h"

namespace cohort {

// What two neighbours become, by their ids.
class MergeTable {
 public:
  static constexpr uint32_t kNever = UINT32_MAX;
  struct Merge {
    uint32_t rank = kNever;  // earlier merges have lower ones
    int32_t id = -1;
  };

  void reserve(size_t merges);
  void set(int32_t left, int32_t right, Merge merge);  // the last one counts
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

// Carries out the merges of a word, which is ids[begin] and what follows: the lowest rank first and
// of equal ones the first, in n log n steps. Shortens `ids` to what is left.
void merge_all(const MergeTable& merges, std::vector<int32_t>& ids, size_t begin);

// Some exports have turned the no-break spaces of Llama 2's tokens into spaces. Merges written as
// "a b" tell: only there can one have a second space, which no tokenizer could read. The tokens are
// then meant with no-break spaces.
bool has_lost_spaces(const Json& merge);
std::string with_no_break_spaces(const std::string& token);

std::unique_ptr<Model> make_bpe(const Json& json, WordText words, Vocabulary& vocabulary);

}  // namespace cohort
