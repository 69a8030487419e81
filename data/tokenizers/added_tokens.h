// Tokens that are found in a text before it is split: <|endoftext|> and its like.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "data/json.h"
#include "data/tokenizers/matcher.h"
#include "data/tokenizers/normalizer.h"

namespace cohort {

struct AddedToken {
  std::string content;
  int64_t id = 0;
  bool single_word = false;  // not inside a word
  bool lstrip = false;       // takes the white space before it
  bool rstrip = false;       // and after it
  bool normalized = false;   // looked for in the normalised text, not in the raw one
  bool special = false;      // gives no text
};

// From an entry of "added_tokens", or of added_tokens_decoder with its id. Throws InputError.
AddedToken read_added_token(const Json& json, int64_t id);

class AddedTokens {
 public:
  AddedTokens() = default;
  AddedTokens(std::vector<AddedToken> tokens, const Normalizer* normalizer);

  // A part of a text: an added token, or text between them (nullptr). No part is empty but a
  // token's.
  using Sink = std::function<void(size_t begin, size_t end, const AddedToken* token)>;
  void find_in_raw(std::string_view text, const Sink& sink) const { find(raw_, text, sink); }
  void find_in_normalized(std::string_view text, const Sink& sink) const {
    find(normalized_, text, sink);
  }
  const std::vector<AddedToken>& tokens() const { return tokens_; }
  // What the i-th token is in a text: its content, normalised where it is looked for so.
  const std::string& text(size_t i) const { return texts_[i]; }

 private:
  struct Set {
    LeftmostLongest matcher;
    std::vector<size_t> places;  // in tokens_, by the matcher's index
  };
  void find(const Set& set, std::string_view text, const Sink& sink) const;

  std::vector<AddedToken> tokens_;
  std::vector<std::string> texts_;
  Set raw_, normalized_;
};

}  // namespace cohort
