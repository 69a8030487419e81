// Tokenizers: bytes, characters, and those of Hugging Face files. A model's folder contains its
// tokenizer, in Hugging Face's format; the end-of-sequence token of bytes and characters is
// <|endoftext|> there.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sys/input_file.h"
#include "text/json.h"

namespace cohort {

// kAdd: encode() adds the tokens that the tokenizer puts around a text (bos, eos).
enum class SpecialTokens { kNone, kAdd };
// kShow: special tokens are decoded to their text. kHideControl: those that may be a part of an
// answer, as <think>, are; those that begin, end or pad texts, and the unknown token, give no text.
enum class SpecialText { kHide, kShow, kHideControl };

// Incremental decoder. Must not outlive its tokenizer.
class DecodeStream {
 public:
  virtual ~DecodeStream() = default;
  // Returns the text that is certain after this id.
  virtual std::string push(int32_t id) = 0;
  // Bytes held back: the rest of the text if it ends here. The stream is unchanged.
  virtual std::string peek() const = 0;
  // Discards the bytes held back now from the output of push() and peek(); the first bytes of a
  // character are kept if later ids complete it. May be called once.
  virtual void discard() = 0;
};

// Byte ranges [begin, end) of a text: ascending, disjoint, none of them empty.
using ByteRanges = std::vector<std::pair<size_t, size_t>>;

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  // Special tokens in the text become their ids. Throws InputError naming the first character
  // without a token and its byte offset, or the first byte that is not UTF-8.
  virtual std::vector<int32_t> encode(std::string_view text,
                                      SpecialTokens special = SpecialTokens::kNone) const = 0;
  // As encode(text), but the special tokens and the tokens added to the vocabulary are found only
  // outside the ranges `plain`; those of white space alone are found anywhere. Otherwise tokens
  // merge across the ends of the ranges.
  virtual std::vector<int32_t> encode_with_plain(std::string_view text,
                                                 const ByteRanges& /*plain*/) const {
    return encode(text);
  }
  // Special tokens give no text by default; ids without a token never do.
  virtual std::string decode(std::span<const int32_t> ids,
                             SpecialText special = SpecialText::kHide) const = 0;
  // The concatenated outputs of the stream equal decode() of all ids. It holds back incomplete
  // characters and text that later ids may still change.
  virtual std::unique_ptr<DecodeStream> decode_stream(
      SpecialText special = SpecialText::kHide) const = 0;
  // Largest id plus one.
  virtual int64_t vocab_size() const = 0;
  // Throws InputError if the tokenizer's files name no end-of-sequence token.
  virtual int32_t eos_id() const = 0;
  // Ids that end a text: eos_id(), then the others of the model's generation_config.json or
  // config.json.
  virtual std::vector<int32_t> stop_ids() const { return {eos_id()}; }
  // Files that restore this tokenizer from a model's folder; if it was read from files, they are
  // returned byte for byte.
  virtual NamedFiles files() const = 0;
};

// 256 bytes and end-of-sequence (256). Encodes any text.
std::unique_ptr<Tokenizer> make_byte_tokenizer();
// One token per distinct Unicode character of `text`, in code point order, then end-of-sequence.
// Throws InputError for text that is empty or not UTF-8.
std::unique_ptr<Tokenizer> make_char_tokenizer(std::string_view text);
// From the result of files() or a model's files (listed in text/tokenizers/hugging_face.h). `where`
// names their folder in errors.
std::unique_ptr<Tokenizer> make_tokenizer(NamedFiles files, const std::string& where);
// The tokenizer of a folder: tokenizer.json (ours or Hugging Face's), else vocab.json and
// merges.txt. Throws InputError naming the file.
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& folder);

// A DecodeStream of the text that follows `before`: some tokenizers remove a space at the start of
// a text, and a character may continue from the ids before.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer, std::span<const int32_t> before = {},
                         SpecialText special = SpecialText::kHide)
      : stream_(tokenizer.decode_stream(special)) {
    constexpr size_t kCharacter = 4;  // maximum UTF-8 bytes
    for (const int32_t id : before.last(std::min(before.size(), kCharacter))) stream_->push(id);
    if (!before.empty()) stream_->discard();
  }
  std::string push(int32_t id) { return stream_->push(id); }
  std::string peek() const { return stream_->peek(); }

 private:
  std::unique_ptr<DecodeStream> stream_;
};

}  // namespace cohort
