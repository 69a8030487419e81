// Tokenizers: bytes, characters, and those of Hugging Face files. A model's folder contains its
// tokenizer, in Hugging Face's format; the end-of-sequence token of bytes and characters is
// <|endoftext|> there.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
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

// Ids and the types (segments) of as many tokens.
struct EncodedText {
  std::vector<int32_t> ids, types;
};
// The ids that encode(kAdd) puts around a text.
struct Surrounding {
  std::vector<int32_t> before, after;
};
// Special tokens around texts, which are kFirst and kSecond among their ids.
struct TextTemplates {
  static constexpr int32_t kFirst = -1, kSecond = -2;
  EncodedText single{{kFirst}, {0}}, pair{{kFirst, kSecond}, {0, 1}};  // pair may be empty
};
// A token's share of a text's words, see Masking in data/masking.h.
struct TokenText {
  std::string bytes;       // with the white space before them; maybe a part of a character
  bool continues = false;  // whatever precedes it ("##" of WordPiece)
};

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
  // As encode(text, kAdd), or a pair of texts, of at most `max_tokens` ids with the special tokens
  // (0: no limit). A single text loses its end; of a pair the longer one does until both are as
  // long, then both, and an odd token stays the longer one's, or the second's. Throws InputError
  // too if special tokens leave no place in the limit or the files have no template of a pair.
  EncodedText encode_texts(std::string_view text, std::optional<std::string_view> pair = {},
                           int64_t max_tokens = 0) const;
  Surrounding surrounding() const;
  virtual TextTemplates text_templates() const { return {}; }
  // The token that stands for a masked one, if the tokenizer's files name it.
  virtual std::optional<int32_t> mask_id() const { return {}; }
  // Empty for special tokens and for ids without a token: neither is a part of a text.
  virtual TokenText token_text(int32_t id) const { return {decode({&id, 1})}; }
  bool is_special(int32_t id) const { return token_text(id).bytes.empty(); }
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
// The file of a model of images, which stands in the place of a tokenizer's.
inline constexpr const char* kImageFile = "preprocessor_config.json";
// Files of which the folder of a tokenizer has one.
inline constexpr const char* kTokenizerFiles[] = {"tokenizer.json", "vocab.json", "vocab.txt",
                                                  kImageFile};
// The tokenizer of a folder: tokenizer.json (ours or Hugging Face's), else vocab.json and
// merges.txt, else vocab.txt, else one of no token that holds the file of a model of images.
// Throws InputError naming the file.
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
