// A hash table with linear probing over keys stored in one string.
#include "text/tokenizers/string_map.h"

#include <functional>
#include <utility>

#include "core/check.h"

namespace cohort {

void StringMap::reserve(size_t keys, size_t bytes) {
  text_.reserve(bytes);
  entries_.reserve(keys);
  size_t slots = 16;
  while (slots < 2 * keys) slots *= 2;
  if (slots > slots_.size()) grow(slots);
}

namespace {

uint32_t hash_of(std::string_view key) {
  return static_cast<uint32_t>(std::hash<std::string_view>{}(key));
}

}  // namespace

size_t StringMap::slot_of(std::string_view key, uint32_t hash) const {
  const size_t mask = slots_.size() - 1;
  size_t slot = hash & mask;
  while (slots_[slot].entry != 0 &&
         (slots_[slot].hash != hash || this->key(slots_[slot].entry - 1) != key))
    slot = (slot + 1) & mask;
  return slot;
}

void StringMap::grow(size_t slots) {
  const std::vector<Slot> old = std::exchange(slots_, std::vector<Slot>(slots));
  for (const Slot& slot : old) {
    if (slot.entry == 0) continue;
    size_t at = slot.hash & (slots - 1);
    while (slots_[at].entry != 0) at = (at + 1) & (slots - 1);
    slots_[at] = slot;
  }
}

bool StringMap::insert(std::string_view key, int32_t value) {
  COHORT_CHECK(value >= 0, "[string_map] expected a value of at least 0, got ", value);
  if (2 * (entries_.size() + 1) > slots_.size()) grow(slots_.empty() ? 16 : 2 * slots_.size());
  const uint32_t hash = hash_of(key);
  const size_t slot = slot_of(key, hash);
  if (slots_[slot].entry != 0) return false;
  entries_.push_back({text_.size(), static_cast<uint32_t>(key.size()), value});
  text_ += key;
  slots_[slot] = {hash, static_cast<uint32_t>(entries_.size())};
  return true;
}

int32_t StringMap::find(std::string_view key) const {
  if (slots_.empty()) return -1;
  const uint32_t entry = slots_[slot_of(key, hash_of(key))].entry;
  return entry == 0 ? -1 : entries_[entry - 1].value;
}

}  // namespace cohort
