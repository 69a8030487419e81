// A hash table from pairs of numbers, for lookups in inner loops.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace cohort {

// Keys are pairs of numbers below 2^32 - 1.
template <class Value>
class PairMap {
 public:
  // Empty, with room for this many pairs.
  explicit PairMap(size_t pairs = 0) : slots_(std::bit_ceil(2 * pairs + 2)) {}
  void set(uint32_t a, uint32_t b, Value value) {  // overwrites an earlier one
    slots_[slot_of(key_of(a, b))] = {key_of(a, b), value};
  }
  // Value() if there is none.
  Value find(uint32_t a, uint32_t b) const { return slots_[slot_of(key_of(a, b))].value; }

 private:
  static constexpr uint64_t kFree = UINT64_MAX;
  struct Slot {
    uint64_t key = kFree;
    Value value = {};
  };
  static uint64_t key_of(uint32_t a, uint32_t b) { return uint64_t{a} << 32 | b; }
  // The slot of a key, or the free one where it belongs.
  size_t slot_of(uint64_t key) const {
    const size_t mask = slots_.size() - 1;
    size_t slot = static_cast<size_t>((key * 0x9e3779b97f4a7c15u) >> 32) & mask;
    while (slots_[slot].key != key && slots_[slot].key != kFree) slot = (slot + 1) & mask;
    return slot;
  }

  std::vector<Slot> slots_;  // a power of two, at most half full
};

}  // namespace cohort
