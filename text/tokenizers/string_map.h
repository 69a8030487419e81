// A map from strings to non-negative integers, packed to load 150,000 entries in milliseconds.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cohort {

class StringMap {
 public:
  void reserve(size_t keys, size_t bytes);
  // Returns false without a change if the key exists.
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
    uint64_t begin;  // offset in text_
    uint32_t size;
    int32_t value;
  };
  struct Slot {
    uint32_t hash = 0;   // compared before the key
    uint32_t entry = 0;  // 1 + index of the entry; 0: free
  };
  size_t slot_of(std::string_view key, uint32_t hash) const;
  void grow(size_t slots);

  std::string text_;
  std::vector<Entry> entries_;
  std::vector<Slot> slots_;  // a power of two, at most half full
};

}  // namespace cohort
