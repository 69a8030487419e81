// A cache of the ids of recent words: most words of a text are repeated.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "core/non_copyable.h"

namespace cohort {

// A direct-mapped cache of 2 MiB: a new word overwrites the entry in its slot. Not thread-safe.
class WordCache {
 public:
  class Pool;
  WordCache() : entries_(kEntries) {}

  // Empty if the word is not cached: words without ids are never stored.
  std::span<const int32_t> find(std::string_view word) const {
    if (word.size() > kMaxBytes) return {};
    const Entry& entry = entries_[slot_of(word)];
    if (entry.size != word.size() || std::memcmp(entry.word, word.data(), word.size()) != 0)
      return {};
    return {entry.ids, entry.count};
  }
  // Long words, and words of many ids, are not stored.
  void store(std::string_view word, std::span<const int32_t> ids) {
    if (word.empty() || word.size() > kMaxBytes || ids.empty() || ids.size() > kMaxIds) return;
    Entry& entry = entries_[slot_of(word)];
    entry.size = static_cast<uint8_t>(word.size());
    entry.count = static_cast<uint8_t>(ids.size());
    std::copy(word.begin(), word.end(), entry.word);
    std::copy(ids.begin(), ids.end(), entry.ids);
  }

 private:
  static constexpr size_t kEntries = 1 << 15, kMaxBytes = 30, kMaxIds = 8;
  struct Entry {
    uint8_t size = 0, count = 0;
    char word[kMaxBytes];
    int32_t ids[kMaxIds];
  };
  static_assert(sizeof(Entry) == 64);

  // Hashes at most kMaxBytes bytes, eight at a time; the last eight may overlap.
  static size_t slot_of(std::string_view word) {
    constexpr uint64_t kMix = 0x9e3779b97f4a7c15u;
    const char* bytes = word.data();
    const size_t size = word.size();
    uint64_t hash = size, part = 0;
    if (size < sizeof part) {
      for (size_t i = 0; i < size; ++i) part = part << 8 | static_cast<uint8_t>(bytes[i]);
    } else {
      for (size_t i = 0; i + sizeof part < size; i += sizeof part) {
        std::memcpy(&part, bytes + i, sizeof part);
        hash = (hash ^ part) * kMix;
        hash ^= hash >> 29;
      }
      std::memcpy(&part, bytes + size - sizeof part, sizeof part);
    }
    return static_cast<size_t>(((hash ^ part) * kMix) >> 32) % kEntries;
  }

  std::vector<Entry> entries_;
};

// The pool of caches of a tokenizer. A call leases one, so that concurrent calls share only the
// lock and short calls profit from earlier ones.
class WordCache::Pool {
 public:
  class Lease : NonCopyable {
   public:
    explicit Lease(Pool& from) : from_(from) {
      const std::lock_guard lock(from_.mutex_);
      if (from_.idle_.empty()) from_.idle_.push_back(std::make_unique<WordCache>());
      cache_ = std::move(from_.idle_.back());
      from_.idle_.pop_back();
    }
    ~Lease() {
      const std::lock_guard lock(from_.mutex_);
      from_.idle_.push_back(std::move(cache_));
    }
    WordCache& operator*() const { return *cache_; }

   private:
    Pool& from_;
    std::unique_ptr<WordCache> cache_;
  };

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<WordCache>> idle_;
};

}  // namespace cohort
