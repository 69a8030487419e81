// The ids of the words that a tokenizer has met lately: most words of a text are repeated.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

namespace cohort {

// Not for several threads at once. 4 MiB; a new word takes the place of another one.
class WordCache {
 public:
  WordCache() : entries_(kEntries) {}
  // Nothing if the word is not there (the size is 0: no word has no ids here).
  std::span<const int32_t> find(std::string_view word) const;
  // Long words and those without ids are not kept.
  void store(std::string_view word, std::span<const int32_t> ids);

 private:
  static constexpr size_t kEntries = 1 << 16, kMaxBytes = 30, kMaxIds = 8;
  struct Entry {
    uint8_t size = 0, count = 0;
    char word[kMaxBytes];
    int32_t ids[kMaxIds];
  };
  static_assert(sizeof(Entry) == 64);

  std::vector<Entry> entries_;
};

// The caches of one tokenizer. A call borrows one, so that calls of several threads share nothing
// but this lock, short calls find what earlier ones have met, and nothing outlives the tokenizer.
class WordCaches {
 public:
  class Lease {
   public:
    explicit Lease(WordCaches& from);
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    WordCache& operator*() const { return *cache_; }

   private:
    WordCaches& from_;
    std::unique_ptr<WordCache> cache_;
  };

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<WordCache>> idle_;
};

}  // namespace cohort
