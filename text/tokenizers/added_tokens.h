// Tokens that are matched in a text before it is split, such as <|endoftext|>.
#pragma once

#include <unordered_map>

#include "text/tokenizer.h"
#include "text/tokenizers/matcher.h"
#include "text/tokenizers/pipeline.h"

namespace cohort {

struct AddedToken {
  std::string content;  // its text; AddedTokens normalises that of a normalised token
  int64_t id = 0;
  bool single_word = false;  // does not match inside a word
  bool lstrip = false;       // also matches the white space before it
  bool rstrip = false;       // also matches the white space after it
  bool normalized = false;   // is matched in the normalised text, not in the raw one
  bool special = false;      // decodes to no text by default
  bool is_space = false;     // its text is white space; set by AddedTokens
};

// Reads an entry of "added_tokens", or of added_tokens_decoder with its id. Throws InputError.
AddedToken read_added_token(const Json& json, int64_t id);

// The first range that ends after `begin`.
inline ByteRanges::const_iterator first_range(const ByteRanges& ranges, size_t begin) {
  return std::upper_bound(ranges.begin(), ranges.end(), begin,
                          [](size_t at, const auto& range) { return at < range.second; });
}

class AddedTokens {
 public:
  AddedTokens() = default;
  AddedTokens(std::vector<AddedToken> tokens, const Normalizer& normalizer);

  // Receives the parts of a text: added tokens, and the text between them (token = nullptr), which
  // is not empty. No token overlaps a range of `plain`, unless it is white space.
  using Sink = std::function<void(size_t begin, size_t end, const AddedToken* token)>;
  void find_in_raw(std::string_view text, const ByteRanges& plain, const Sink& sink) const {
    find_all(raw_, text, plain, sink);
  }
  void find_in_normalized(std::string_view text, const ByteRanges& plain, const Sink& sink) const {
    find_all(normalized_, text, plain, sink);
  }
  // nullptr if no added token has this id.
  const AddedToken* find(int64_t id) const;

 private:
  void find_all(const LeftmostLongest& matcher, std::string_view text, const ByteRanges& plain,
                const Sink& sink) const;

  std::vector<AddedToken> tokens_;
  std::unordered_map<int64_t, size_t> by_id_;
  LeftmostLongest raw_, normalized_;  // their texts are those of tokens_, or empty
};

}  // namespace cohort
