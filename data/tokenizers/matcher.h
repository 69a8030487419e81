// Many texts looked for at once (Aho and Corasick, 1975), in time proportional to the text and the
// number of hits, however the texts overlap.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace cohort {

class Matcher {
 public:
  // Texts that are empty are never found.
  explicit Matcher(const std::vector<std::string_view>& texts);
  Matcher() : Matcher(std::vector<std::string_view>{}) {}

  static constexpr uint32_t kRoot = 0;
  static constexpr int32_t kNone = -1;
  // The state after one byte more.
  uint32_t next(uint32_t state, uint8_t byte) const;
  // The longest of the texts that end here, and the state of the next shorter one; both from
  // first(state) on.
  uint32_t first(uint32_t state) const { return text_[state] != kNone ? state : shorter_[state]; }
  int32_t text(uint32_t state) const { return text_[state]; }  // kNone: no more
  uint32_t shorter(uint32_t state) const { return shorter_[state]; }
  bool empty() const { return text_.size() == 1; }
  bool starts(uint8_t byte) const { return roots_[byte] != kRoot; }

 private:
  uint32_t child(uint32_t state, uint8_t byte) const;
  void add(uint32_t state, uint8_t byte, uint32_t child);

  std::vector<uint32_t> roots_;    // by byte: the root's children
  std::vector<uint64_t> edges_;    // (state, byte) above, child below; 0: free
  std::vector<uint32_t> fail_;     // the longest proper suffix that is a state
  std::vector<uint32_t> shorter_;  // the longest one at which a text ends; the root if none
  std::vector<int32_t> text_;      // that ends exactly here
};

struct Match {
  size_t begin = 0, end = 0;
  int32_t text = 0;  // its index
};

// Matches without overlaps: of those that start first, the longest, and on from its end.
class LeftmostLongest {
 public:
  LeftmostLongest() = default;
  explicit LeftmostLongest(const std::vector<std::string>& texts);
  std::vector<Match> find_all(std::string_view text) const;

 private:
  Matcher reversed_;
  std::vector<size_t> sizes_;
};

}  // namespace cohort
