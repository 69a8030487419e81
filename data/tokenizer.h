// Text to token ids and back. Byte and character tokenizers; saved as one JSON file with every
// checkpoint.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/json.h"

namespace cohort {

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  // Throws InputError naming the first character that has no token and its byte offset.
  virtual std::vector<int32_t> encode(std::string_view text) const = 0;
  // Special tokens (end of sequence) give no text; ids outside the vocabulary throw Error.
  virtual std::string decode(std::span<const int32_t> ids) const = 0;
  // Ids are 0 .. vocab_size() - 1; the end-of-sequence token is one of them.
  virtual int64_t vocab_size() const = 0;
  virtual int32_t eos_id() const = 0;
  virtual Json to_json() const = 0;
};

// 256 bytes and end-of-sequence (256). Encodes any text.
std::unique_ptr<Tokenizer> make_byte_tokenizer();
// One token per distinct Unicode character of `text`, in code point order, then end-of-sequence.
// Throws InputError for text that is empty or not UTF-8.
std::unique_ptr<Tokenizer> make_char_tokenizer(std::string_view text);
// From what to_json() gave. Throws InputError for an unknown type or a damaged file.
std::unique_ptr<Tokenizer> make_tokenizer(const Json& json);

}  // namespace cohort
