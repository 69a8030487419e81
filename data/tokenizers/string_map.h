// Texts and what they stand for, packed: 150,000 of them are read in milliseconds.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cohort {

class StringMap {
 public:
  void reserve(size_t keys, size_t bytes);
  // False, and no change, if the key is there.
  bool insert(std::string_view key, int32_t value);
  // -1 if there is no such key; values are at least 0.
  int32_t find(std::string_view key) const;
  size_t size() const { return entries_.size(); }
  // The i-th key in the order of insertion.
  std::string_view key(size_t i) const {
    return std::string_view(text_).substr(entries_[i].begin, entries_[i].size);
  }
  int32_t value(size_t i) const { return entries_[i].value; }

 private:
  struct Entry {
    uint64_t begin;  // in text_
    uint32_t size;
    int32_t value;
  };
  struct Slot {
    uint32_t hash = 0;   // most keys that differ do so here, without a look at them
    uint32_t entry = 0;  // 1 + its index; 0: free
  };
  size_t slot_of(std::string_view key, uint32_t hash) const;
  void grow(size_t slots);

  std::string text_;
  std::vector<Entry> entries_;
  std::vector<Slot> slots_;  // a power of two, at most half full
};

}  // namespace cohort
