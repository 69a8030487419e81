// The byte and the character tokenizer. Special tokens come after the text tokens, so that a text
// token's id is its place in the alphabet.
#include "data/tokenizer.h"

#include <algorithm>

#include "data/utf8.h"

namespace cohort {
namespace {

void check_id(int32_t id, int64_t vocab_size) {
  COHORT_CHECK(id >= 0 && id < vocab_size, "[tokenizer] id ", id, " is outside the vocabulary of ",
               vocab_size, " tokens");
}

class ByteTokenizer final : public Tokenizer {
 public:
  std::vector<int32_t> encode(std::string_view text) const override {
    std::vector<int32_t> ids(text.size());
    std::transform(text.begin(), text.end(), ids.begin(),
                   [](char c) { return static_cast<uint8_t>(c); });
    return ids;
  }
  std::string decode(std::span<const int32_t> ids) const override {
    std::string text;
    for (const int32_t id : ids) {
      check_id(id, vocab_size());
      if (id != eos_id()) text += static_cast<char>(id);
    }
    return text;
  }
  int64_t vocab_size() const override { return 257; }
  int32_t eos_id() const override { return 256; }
  Json to_json() const override { return Json().set("type", "byte"); }
};

// Throws InputError("byte N is not UTF-8 text").
char32_t character_at(std::string_view text, size_t at, size_t& size) {
  const Utf8Char c = decode_utf8(text, at);
  if (c.size == 0)
    throw InputError(str("byte ", at, " is not part of UTF-8 text; hint: convert the text to ",
                         "UTF-8, or use the byte tokenizer, which takes any bytes"));
  size = c.size;
  return c.code;
}

class CharTokenizer final : public Tokenizer {
 public:
  // `alphabet`: ascending, not empty.
  explicit CharTokenizer(std::vector<char32_t> alphabet) : alphabet_(std::move(alphabet)) {}

  std::vector<int32_t> encode(std::string_view text) const override {
    std::vector<int32_t> ids;
    ids.reserve(text.size());
    for (size_t at = 0, size = 0; at < text.size(); at += size) {
      const char32_t code = character_at(text, at, size);
      const auto it = std::lower_bound(alphabet_.begin(), alphabet_.end(), code);
      if (it == alphabet_.end() || *it != code)
        throw InputError(str("the character ", describe_character(code), " at byte ", at,
                             " has no token; hint: the vocabulary has ", alphabet_.size(),
                             " characters, add this one to the text it is made from"));
      ids.push_back(static_cast<int32_t>(it - alphabet_.begin()));
    }
    return ids;
  }
  std::string decode(std::span<const int32_t> ids) const override {
    std::string text;
    for (const int32_t id : ids) {
      check_id(id, vocab_size());
      if (id != eos_id()) text += encode_utf8(alphabet_[static_cast<size_t>(id)]);
    }
    return text;
  }
  int64_t vocab_size() const override { return static_cast<int64_t>(alphabet_.size()) + 1; }
  int32_t eos_id() const override { return static_cast<int32_t>(alphabet_.size()); }
  Json to_json() const override {
    std::string characters;
    for (const char32_t code : alphabet_) characters += encode_utf8(code);
    return Json().set("type", "char").set("characters", characters);
  }

 private:
  std::vector<char32_t> alphabet_;
};

std::vector<char32_t> characters_of(std::string_view text) {
  std::vector<char32_t> codes;
  for (size_t at = 0, size = 0; at < text.size(); at += size)
    codes.push_back(character_at(text, at, size));
  return codes;
}

}  // namespace

std::unique_ptr<Tokenizer> make_byte_tokenizer() {
  return std::make_unique<ByteTokenizer>();
}

std::unique_ptr<Tokenizer> make_char_tokenizer(std::string_view text) {
  if (text.empty()) throw InputError("the text that the character tokenizer is made from is empty");
  std::vector<char32_t> alphabet = characters_of(text);
  std::sort(alphabet.begin(), alphabet.end());
  alphabet.erase(std::unique(alphabet.begin(), alphabet.end()), alphabet.end());
  return std::make_unique<CharTokenizer>(std::move(alphabet));
}

std::unique_ptr<Tokenizer> make_tokenizer(const Json& json) {
  const Json* type = json.find("type");
  if (type == nullptr || !type->is_string())
    throw InputError("damaged tokenizer: expected an object with the text 'type'");
  if (type->as_string() == "byte") return make_byte_tokenizer();
  if (type->as_string() != "char")
    throw InputError(str("unknown tokenizer type '", type->as_string(), "'; known: byte, char"));
  const Json* characters = json.find("characters");
  if (characters == nullptr || !characters->is_string() || characters->as_string().empty())
    throw InputError("damaged tokenizer: expected the text 'characters', not empty");
  std::vector<char32_t> alphabet = characters_of(characters->as_string());
  // Ids are places in this list: sorting a damaged one would silently renumber the vocabulary.
  for (size_t i = 1; i < alphabet.size(); ++i)
    if (alphabet[i - 1] >= alphabet[i])
      throw InputError(str("damaged tokenizer: 'characters' must ascend, but ",
                           describe_character(alphabet[i]), " follows ",
                           describe_character(alphabet[i - 1])));
  return std::make_unique<CharTokenizer>(std::move(alphabet));
}

}  // namespace cohort
