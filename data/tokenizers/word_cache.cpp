#include "data/tokenizers/word_cache.h"

#include <algorithm>
#include <cstring>
#include <functional>

namespace cohort {
namespace {

size_t hash_word(std::string_view word) {
  return std::hash<std::string_view>{}(word);
}

}  // namespace

std::span<const int32_t> WordCache::find(std::string_view word) const {
  if (word.size() > kMaxBytes) return {};
  const Entry& entry = entries_[hash_word(word) % kEntries];
  if (entry.size != word.size() || std::memcmp(entry.word, word.data(), word.size()) != 0)
    return {};
  return {entry.ids, entry.count};
}

void WordCache::store(std::string_view word, std::span<const int32_t> ids) {
  if (word.empty() || word.size() > kMaxBytes || ids.empty() || ids.size() > kMaxIds) return;
  Entry& entry = entries_[hash_word(word) % kEntries];
  entry.size = static_cast<uint8_t>(word.size());
  entry.count = static_cast<uint8_t>(ids.size());
  std::copy(word.begin(), word.end(), entry.word);
  std::copy(ids.begin(), ids.end(), entry.ids);
}

WordCaches::Lease::Lease(WordCaches& from) : from_(from) {
  std::lock_guard lock(from_.mutex_);
  if (from_.idle_.empty()) {
    cache_ = std::make_unique<WordCache>();
    return;
  }
  cache_ = std::move(from_.idle_.back());
  from_.idle_.pop_back();
}

WordCaches::Lease::~Lease() {
  std::lock_guard lock(from_.mutex_);
  from_.idle_.push_back(std::move(cache_));
}

}  // namespace cohort
