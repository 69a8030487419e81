// Text to token ids and back: bytes, characters, and what Hugging Face's files describe. A model's
// folder holds its tokenizer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/file.h"
#include "data/json.h"

namespace cohort {

// Whether encode() adds what the tokenizer puts around a text (bos, eos).
enum class SpecialTokens { kNone, kAdd };
// Whether special tokens give their text.
enum class SpecialText { kHide, kShow };

// The text of ids that arrive one after the other. Lives no longer than its tokenizer.
class DecodeStream {
 public:
  virtual ~DecodeStream() = default;
  // The text that is certain now.
  virtual std::string push(int32_t id) = 0;
  // The bytes held back: the rest of the text if it ends here. The stream is unchanged.
  virtual std::string peek() const = 0;
  // Leaves out of the text what is held back now, as push() and peek() will return it; the first
  // bytes of a character stay where the ids that follow finish it. May be called once.
  virtual void discard() = 0;
};

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  // Throws InputError naming the first character that has no token and its byte offset, or the
  // first byte that is no UTF-8. Special tokens in the text become their ids.
  virtual std::vector<int32_t> encode(std::string_view text,
                                      SpecialTokens special = SpecialTokens::kNone) const = 0;
  // Special tokens give no text by default, and ids that no token has give none.
  virtual std::string decode(std::span<const int32_t> ids,
                             SpecialText special = SpecialText::kHide) const = 0;
  // What its outputs are one after the other is decode() of all ids. Holds back a character until
  // its last byte is there, and what the tokenizer's files say may still change.
  virtual std::unique_ptr<DecodeStream> decode_stream(
      SpecialText special = SpecialText::kHide) const = 0;
  // One more than the largest id.
  virtual int64_t vocab_size() const = 0;
  // Throws InputError if the tokenizer's files name no end-of-sequence token.
  virtual int32_t eos_id() const = 0;
  // What ends a text: eos_id(), then the other ids that the model's generation_config.json or
  // config.json names.
  virtual std::vector<int32_t> stop_ids() const { return {eos_id()}; }
  // What a model's folder needs to have this tokenizer again: one read from files gives them back
  // byte for byte.
  virtual NamedFiles files() const;
  // Of the byte and the character tokenizer; Error for others, which have files.
  virtual Json to_json() const = 0;
};

// 256 bytes and end-of-sequence (256). Encodes any text.
std::unique_ptr<Tokenizer> make_byte_tokenizer();
// One token per distinct Unicode character of `text`, in code point order, then end-of-sequence.
// Throws InputError for text that is empty or not UTF-8.
std::unique_ptr<Tokenizer> make_char_tokenizer(std::string_view text);
// From what to_json() gave. Throws InputError for an unknown type or a damaged file.
std::unique_ptr<Tokenizer> make_tokenizer(const Json& json);
// From what files() gave, or a model's files (data/tokenizers/hugging_face.h says which). `where`
// names their folder in errors.
std::unique_ptr<Tokenizer> make_tokenizer(NamedFiles files, const std::string& where);
// The tokenizer of a folder: tokenizer.json (ours or Hugging Face's), else vocab.json and
// merges.txt. Throws InputError naming the file.
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& folder);

// A DecodeStream of the text that follows other ids: some tokenizers drop a space at the start of a
// text, and a character may have begun before.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer, std::span<const int32_t> before = {})
      : stream_(tokenizer.decode_stream()) {
    constexpr size_t kCharacter = 4;  // bytes of the longest
    for (const int32_t id : before.last(std::min(before.size(), kCharacter))) stream_->push(id);
    if (!before.empty()) stream_->discard();
  }
  std::string push(int32_t id) { return stream_->push(id); }
  std::string peek() const { return stream_->peek(); }

 private:
  std::unique_ptr<DecodeStream> stream_;
};

}  // namespace cohort
