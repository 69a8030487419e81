#include "text/tokenizers/word_cache.h"

#include <algorithm>

namespace cohort {
void WordCache::store(std::string_view word, std::span<const int32_t> ids) {
  if (word.empty() || word.size() > kMaxBytes || ids.empty() || ids.size() > kMaxIds) return;
  Entry& entry = entries_[slot_of(word)];
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
