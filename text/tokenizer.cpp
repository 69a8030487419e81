// The byte and the character tokenizer, whose special tokens follow the text tokens, so that a text
// token's id is its index in the alphabet; and detection of a folder's tokenizer.
#include "text/tokenizer.h"

#include "sys/files.h"
#include "text/chat_template.h"
#include "text/tokenizers/byte_level.h"
#include "text/tokenizers/hugging_face.h"
#include "text/tokenizers/json_fields.h"
#include "text/utf8.h"

namespace cohort {
namespace {

// Files that a tokenizer reads or that belong to it.
constexpr const char* kFiles[] = {
    "tokenizer.json",          "vocab.json",  "merges.txt",        "tokenizer_config.json",
    "special_tokens_map.json", "vocab.txt",   "added_tokens.json", "chat_template.jinja",
    "generation_config.json",  "config.json", "chat_template.json"};

constexpr const char* kEos = "<|endoftext|>";

// No token is added. transformers writes this one in place of null.
constexpr const char* kPostProcessor = R"({"type": "TemplateProcessing",
  "single": [{"Sequence": {"id": "A", "type_id": 0}}],
  "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
  "special_tokens": {}})";

// The place of a tokenizer in models of images.
class ImageFiles final : public Tokenizer {
 public:
  ImageFiles(NamedFiles files, std::string where)
      : files_(std::move(files)), where_(std::move(where)) {}
  std::vector<int32_t> encode(std::string_view, SpecialTokens) const override { fail(); }
  std::string decode(std::span<const int32_t>, SpecialText) const override { return ""; }
  std::unique_ptr<DecodeStream> decode_stream(SpecialText) const override { fail(); }
  int64_t vocab_size() const override { return 0; }
  int32_t eos_id() const override { fail(); }
  NamedFiles files() const override { return files_; }

 private:
  [[noreturn]] void fail() const {
    throw InputError(where_ + ": is a model of images, which reads no text");
  }
  NamedFiles files_;
  std::string where_;
};

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
  // Hugging Face's library gives the same ids for UTF-8 text, but finds the end-of-sequence token
  // in a text that contains it.
  NamedFiles files() const final;

 protected:
  // The pre_tokenizer, decoder and model of tokenizer.json, and its merges.
  virtual TokenizerParts parts() const = 0;
  // Name of a token in the vocabulary.
  virtual std::string name(int32_t id) const { return token(id); }
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

NamedFiles PlainTokenizer::files() const {
  TokenizerParts parts = this->parts();
  parts.post_processor = kPostProcessor;
  for (int32_t id = 0; id < eos_id(); ++id) parts.vocabulary.emplace_back(name(id), id);
  parts.special = {{kEos, eos_id()}};
  return tokenizer_files(std::move(parts));
}

class ByteTokenizer final : public PlainTokenizer {
 public:
  std::vector<int32_t> encode(std::string_view text, SpecialTokens) const override {
    const auto* const bytes = reinterpret_cast<const uint8_t*>(text.data());
    return {bytes, bytes + text.size()};
  }
  int32_t eos_id() const override { return 256; }

 protected:
  TokenizerParts parts() const override {
    return {.pre_tokenizer = R"({"type": "ByteLevel", "add_prefix_space": false,
                                 "trim_offsets": true, "use_regex": false})",
            .decoder = R"({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true,
                           "use_regex": true})"};
  }
  std::string token(int32_t id) const override { return {static_cast<char>(id)}; }
  std::string name(int32_t id) const override { return to_byte_characters(token(id)); }
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
  TokenizerParts parts() const override {
    // An unknown character is an error: no vocabulary of characters has the unk_token.
    return {.pre_tokenizer = R"({"type": "Split", "pattern": {"Regex": "[\\s\\S]"},
                                 "behavior": "Isolated", "invert": false})",
            .decoder = R"({"type": "Fuse"})",
            .model = R"({"type": "WordLevel", "vocab": null, "unk_token": "<|unknown|>"})"};
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

// The format of earlier versions.
std::unique_ptr<Tokenizer> read_old_tokenizer(const Json& json) {
  const std::string *type = json.find_text("type"), *characters = json.find_text("characters");
  if (type == nullptr)
    throw InputError("damaged tokenizer: expected an object with the text 'type'");
  if (*type == "byte") return make_byte_tokenizer();
  if (*type != "char")
    throw InputError(str("unknown tokenizer type '", *type, "'; known: byte, char"));
  if (characters == nullptr || characters->empty())
    throw InputError("damaged tokenizer: expected the text 'characters', not empty");
  std::vector<char32_t> alphabet = characters_of(*characters);
  // Ids are indices into this list: sorting a damaged one would silently renumber the vocabulary.
  for (size_t i = 1; i < alphabet.size(); ++i)
    if (alphabet[i - 1] >= alphabet[i])
      throw InputError(str("damaged tokenizer: 'characters' must ascend, but ",
                           describe_character(alphabet[i]), " follows ",
                           describe_character(alphabet[i - 1])));
  return std::make_unique<CharTokenizer>(std::move(alphabet));
}

// The byte or character tokenizer whose tokenizer.json this is; nullptr for any other one.
std::unique_ptr<Tokenizer> recognize_plain(const std::string& text, const std::string& where) {
  constexpr size_t kByteFile = 1 << 16;  // more than the byte tokenizer's file has
  const bool word_level = text.find("\"WordLevel\"") != text.npos;
  if (!word_level && text.size() > kByteFile) return nullptr;
  Json json = parse_json(text, where);
  const Json& vocabulary = json.get_or_null("model").get_or_null("vocab");
  if (!vocabulary.is_object() || vocabulary.as_object().empty()) return nullptr;
  std::string characters;
  if (word_level)
    for (const auto& [token, id] : vocabulary.as_object()) characters += token;
  auto plain = characters.empty() ? make_byte_tokenizer() : make_char_tokenizer(characters);
  // Settings of a call, which transformers saves.
  for (const char* setting : {"truncation", "padding"}) json.set(setting, Json());
  if (json.dump(2) + "\n" != plain->files()[0].second) return nullptr;
  return plain;
}

}  // namespace

EncodedText Tokenizer::encode_texts(std::string_view text, std::optional<std::string_view> pair,
                                    int64_t max_tokens) const {
  const TextTemplates templates = text_templates();
  const EncodedText& parts = pair ? templates.pair : templates.single;
  if (parts.ids.empty())
    throw InputError("the tokenizer's post_processor has no template with both texts of a pair");
  std::vector<int32_t> texts[] = {encode(text), pair ? encode(*pair) : std::vector<int32_t>()};
  const int64_t special = std::ranges::count_if(parts.ids, [](int32_t id) { return id >= 0; });
  if (max_tokens > 0 && max_tokens < special + std::ssize(texts[0]) + std::ssize(texts[1])) {
    if (max_tokens <= special)
      throw InputError(str("a limit of ", max_tokens, " tokens has no room for a text beside ",
                           special, " special ones; hint: a larger model.context or ",
                           "max_seq_length"));
    const auto room = static_cast<size_t>(max_tokens - special);
    const bool swapped = texts[0].size() > texts[1].size();
    std::vector<int32_t>&shorter = texts[swapped], &longer = texts[!swapped];
    shorter.resize(std::min(shorter.size(), room / 2));
    longer.resize(std::min(longer.size(), room - shorter.size()));
  }
  EncodedText out;
  for (size_t i = 0; i < parts.ids.size(); ++i) {
    const std::span<const int32_t> part(&parts.ids[i], 1),
        ids = part[0] < 0 ? texts[part[0] == TextTemplates::kSecond] : part;
    out.ids.insert(out.ids.end(), ids.begin(), ids.end());
    out.types.resize(out.ids.size(), parts.types[i]);
  }
  return out;
}

Surrounding Tokenizer::surrounding() const {
  const std::vector<int32_t> ids = text_templates().single.ids;
  const auto text = std::ranges::find(ids, TextTemplates::kFirst);
  return {{ids.begin(), text}, {text + 1, ids.end()}};
}

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
  const std::string* json = find_file(files, "tokenizer.json");
  const auto has = [&](const char* name) { return find_file(files, name) != nullptr; };
  if (json == nullptr && !has("vocab.json") && !has("vocab.txt") && has(kImageFile))
    return std::make_unique<ImageFiles>(NamedFiles{{kImageFile, *find_file(files, kImageFile)}},
                                        where);
  if (json == nullptr && !(has("vocab.json") && has("merges.txt")) && !has("vocab.txt"))
    throw InputError(str(where,
                         ": has no tokenizer; hint: tokenizer.json is needed, or vocab.json ",
                         "and merges.txt, or vocab.txt"));
  // Cohort's old files are small and have a "type" where Hugging Face's have a "model".
  if (json != nullptr && json->find("\"model\"") == std::string::npos) {
    const std::string path = where + "/tokenizer.json";
    const Json saved = parse_json(*json, path);
    return with_path(path, [&] {
      return with_location(saved, path, [&] { return read_old_tokenizer(saved); });
    });
  }
  // These have no chat template: with one, the files are those of a byte-level or a word model.
  if (json != nullptr)
    if (auto plain = recognize_plain(*json, where + "/tokenizer.json");
        plain != nullptr && !find_chat_template(files))
      return plain;
  return make_hugging_face_tokenizer(std::move(files), where);
}

std::unique_ptr<Tokenizer> load_tokenizer(const std::string& folder) {
  if (!path_exists(folder + "/."))
    throw InputError(
        str(folder, ": is not a folder; hint: name the folder of the tokenizer's files"));
  NamedFiles files = read_files(folder, kFiles);
  if (std::ranges::none_of(kTokenizerFiles,
                           [&](const char* name) { return find_file(files, name); }))
    files = read_files(folder, {&kImageFile, 1});
  return make_tokenizer(std::move(files), folder);
}

}  // namespace cohort
