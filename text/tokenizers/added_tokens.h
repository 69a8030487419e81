// Tokens that are matched in a text before it is split, such as <|endoftext|>.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "text/json.h"
#include "text/tokenizers/matcher.h"
#include "text/tokenizers/normalizer.h"

namespace cohort {

struct AddedToken {
  std::string content;
  int64_t id = 0;
  bool single_word = false;  // does not match inside a word
  bool lstrip = false;       // also matches the white space before it
  bool rstrip = false;       // also matches the white space after it
  bool normalized = false;   // is matched in the normalised text, not in the raw one
  bool special = false;      // decodes to no text by default
};

// Reads an entry of "added_tokens", or of added_tokens_decoder with its id. Throws InputError.
AddedToken read_added_token(const Json& json, int64_t id);

class AddedTokens {
 public:
  AddedTokens() = default;
  AddedTokens(std::vector<AddedToken> tokens, const Normalizer& normalizer);

  // Receives the parts of a text: added tokens, and the text between them (token = nullptr), which
  // is not empty.
  using Sink = std::function<void(size_t begin, size_t end, const AddedToken* token)>;
  void find_in_raw(std::string_view text, const Sink& sink) const { find(raw_, text, sink); }
  void find_in_normalized(std::string_view text, const Sink& sink) const {
    find(normalized_, text, sink);
  }
  const std::vector<AddedToken>& tokens() const { return tokens_; }
  // The text of the i-th token: its content, normalised if it is matched in the normalised text.
  const std::string& text(size_t i) const { return texts_[i]; }

 private:
  struct Set {
    LeftmostLongest matcher;
    std::vector<size_t> tokens;  // by the matcher's index: index into tokens_
  };
  void find(const Set& set, std::string_view text, const Sink& sink) const;

  std::vector<AddedToken> tokens_;
  std::vector<std::string> texts_;
  Set raw_, normalized_;
};

}  // namespace cohort
