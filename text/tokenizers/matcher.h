// Multi-pattern string matching (Aho and Corasick, 1975), in time linear in the text and the number
// of matches.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizers/pair_map.h"

namespace cohort {

class Matcher {
 public:
  // Empty texts never match.
  explicit Matcher(const std::vector<std::string_view>& texts);
  Matcher() : Matcher(std::vector<std::string_view>{}) {}

  static constexpr uint32_t kRoot = 0;
  static constexpr int32_t kNone = -1;
  // The state after the next byte.
  uint32_t next(uint32_t state, uint8_t byte) const;
  // Iterates over the texts that end at a state, longest first: start at first(state), and follow
  // shorter().
  uint32_t first(uint32_t state) const { return text_[state] != kNone ? state : shorter_[state]; }
  int32_t text(uint32_t state) const { return text_[state]; }  // kNone: no more
  uint32_t shorter(uint32_t state) const { return shorter_[state]; }
  bool empty() const { return text_.size() == 1; }
  bool starts(uint8_t byte) const { return roots_[byte] != kRoot; }

 private:
  std::vector<uint32_t> roots_;    // by byte: the root's children, once more
  PairMap<uint32_t> edges_;        // children by state and byte: a vocabulary has a million of them
  std::vector<uint32_t> fail_;     // the longest proper suffix that is a state
  std::vector<uint32_t> shorter_;  // the longest proper suffix where a text ends, or the root
  std::vector<int32_t> text_;      // index of the text that ends at the state
};

struct Match {
  size_t begin = 0, end = 0;
  int32_t text = 0;  // index
};

// Non-overlapping matches of those that are allowed (null: all): the leftmost, of these the
// longest, then from its end.
class LeftmostLongest {
 public:
  LeftmostLongest() = default;
  explicit LeftmostLongest(const std::vector<std::string>& texts);
  using Filter = std::function<bool(const Match&)>;
  std::vector<Match> find_all(std::string_view text, const Filter& is_allowed = {}) const;

 private:
  Matcher reversed_;
  std::vector<size_t> sizes_;
};

}  // namespace cohort
