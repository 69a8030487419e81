// A hash table with linear probing over keys that lie in one string.
#include "data/tokenizers/string_map.h"

#include <functional>

#include "core/check.h"

namespace cohort {

void StringMap::reserve(size_t keys, size_t bytes) {
  text_.reserve(bytes);
  entries_.reserve(keys);
  size_t slots = 16;
  while (slots < 2 * keys) slots *= 2;
  if (slots > slots_.size()) grow(slots);
}

size_t StringMap::slot_of(std::string_view key) const {
  const size_t mask = slots_.size() - 1;
  size_t slot = std::hash<std::string_view>{}(key)&mask;
  while (slots_[slot] != 0 && this->key(slots_[slot] - 1) != key) slot = (slot + 1) & mask;
  return slot;
}

void StringMap::grow(size_t slots) {
  slots_.assign(slots, 0);
  for (size_t i = 0; i < entries_.size(); ++i)
    slots_[slot_of(key(i))] = static_cast<uint32_t>(i + 1);
}

bool StringMap::insert(std::string_view key, int32_t value) {
  COHORT_CHECK(value >= 0, "[string_map] expected a value of at least 0, got ", value);
  if (2 * (entries_.size() + 1) > slots_.size()) grow(slots_.empty() ? 16 : 2 * slots_.size());
  const size_t slot = slot_of(key);
  if (slots_[slot] != 0) return false;
  entries_.push_back({text_.size(), static_cast<uint32_t>(key.size()), value});
  text_ += key;
  slots_[slot] = static_cast<uint32_t>(entries_.size());
  return true;
}

int32_t StringMap::find(std::string_view key) const {
  if (slots_.empty()) return -1;
  const uint32_t entry = slots_[slot_of(key)];
  return entry == 0 ? -1 : entries_[entry - 1].value;
}

}  // namespace cohort
