// The byte and the character tokenizer, whose special tokens follow the text tokens, so that a text
// token's id is its index in the alphabet; and detection of a folder's tokenizer.
#include "text/tokenizer.h"

#include <algorithm>

#include "sys/files.h"
#include "sys/input_file.h"
#include "text/tokenizers/hugging_face.h"
#include "text/utf8.h"

namespace cohort {
namespace {

// Files that a tokenizer reads or that belong to it.
constexpr const char* kFiles[] = {
    "tokenizer.json",          "vocab.json",        "merges.txt",          "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
    "generation_config.json",  "config.json"};

// A tokenizer whose tokens decode independently and whose last token is end-of-sequence.
class PlainTokenizer : public Tokenizer {
 public:
  std::string decode(std::span<const int32_t> ids, SpecialText) const final {
    std::string text;
    for (const int32_t id : ids) text += text_of(id);
    return text;
  }
  std::unique_ptr<DecodeStream> decode_stream(SpecialText) const final {
    return std::make_unique<Stream>(*this);
  }
  int64_t vocab_size() const final { return int64_t{eos_id()} + 1; }
  NamedFiles files() const final { return {{"tokenizer.json", to_json().dump(2) + "\n"}}; }

 protected:
  // Read by read_plain_tokenizer().
  virtual Json to_json() const = 0;
  // `id`: from 0 to eos_id() - 1.
  virtual std::string token(int32_t id) const = 0;

 private:
  class Stream final : public DecodeStream {
   public:
    explicit Stream(const PlainTokenizer& tokenizer) : tokenizer_(tokenizer) {}
    std::string push(int32_t id) override { return bytes_.push(tokenizer_.text_of(id)); }
    std::string peek() const override { return bytes_.held(); }
    void discard() override { bytes_.discard(); }

   private:
    const PlainTokenizer& tokenizer_;
    Utf8Stream bytes_;
  };

  std::string text_of(int32_t id) const {
    return id < 0 || id >= eos_id() ? std::string() : token(id);
  }
};

class ByteTokenizer final : public PlainTokenizer {
 public:
  std::vector<int32_t> encode(std::string_view text, SpecialTokens) const override {
    std::vector<int32_t> ids(text.size());
    std::transform(text.begin(), text.end(), ids.begin(),
                   [](char c) { return static_cast<uint8_t>(c); });
    return ids;
  }
  int32_t eos_id() const override { return 256; }

 protected:
  Json to_json() const override { return Json().set("type", "byte"); }
  std::string token(int32_t id) const override { return {static_cast<char>(id)}; }
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

class CharTokenizer final : public PlainTokenizer {
 public:
  // `alphabet`: ascending, not empty.
  explicit CharTokenizer(std::vector<char32_t> alphabet) : alphabet_(std::move(alphabet)) {}

  std::vector<int32_t> encode(std::string_view text, SpecialTokens) const override {
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
  int32_t eos_id() const override { return static_cast<int32_t>(alphabet_.size()); }

 protected:
  Json to_json() const override {
    std::string characters;
    for (const char32_t code : alphabet_) characters += encode_utf8(code);
    return Json().set("type", "char").set("characters", characters);
  }
  std::string token(int32_t id) const override {
    return encode_utf8(alphabet_[static_cast<size_t>(id)]);
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

std::unique_ptr<Tokenizer> read_plain_tokenizer(const Json& json) {
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
  // Ids are indices into this list: sorting a damaged one would silently renumber the vocabulary.
  for (size_t i = 1; i < alphabet.size(); ++i)
    if (alphabet[i - 1] >= alphabet[i])
      throw InputError(str("damaged tokenizer: 'characters' must ascend, but ",
                           describe_character(alphabet[i]), " follows ",
                           describe_character(alphabet[i - 1])));
  return std::make_unique<CharTokenizer>(std::move(alphabet));
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

std::unique_ptr<Tokenizer> make_tokenizer(NamedFiles files, const std::string& where) {
  const auto find = [&](const char* name) {
    return std::find_if(files.begin(), files.end(), [&](const auto& f) { return f.first == name; });
  };
  const auto json = find("tokenizer.json");
  if (json == files.end() &&
      (find("vocab.json") == files.end() || find("merges.txt") == files.end()))
    throw InputError(str(where,
                         ": has no tokenizer; hint: tokenizer.json is needed, or vocab.json ",
                         "and merges.txt"));
  // Cohort's files are small and have a "type" where Hugging Face's have a "model".
  if (json != files.end() && json->second.find("\"model\"") == std::string::npos) {
    const std::string path = where + "/tokenizer.json";
    const Json saved = parse_json(json->second, path);
    try {
      return with_places(saved, path, [&] { return read_plain_tokenizer(saved); });
    } catch (const InputError& e) {
      const std::string message = e.what();
      throw InputError(message.starts_with(path) ? message : str(path, ": ", message));
    }
  }
  return make_hugging_face_tokenizer(std::move(files), where);
}

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& folder) {
  if (!path_exists(folder + "/."))
    throw InputError(
        str(folder, ": is not a folder; hint: name the folder of the tokenizer's files"));
  return make_tokenizer(read_files(folder, kFiles), folder);
}

}  // namespace cohort
