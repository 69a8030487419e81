// Encoding: added tokens of the raw text, normaliser, added tokens of the normalised text,
// pre-tokenizer, model, post-processor. Decoding: the decoder.
#include "text/tokenizers/hugging_face.h"

#include <algorithm>
#include <optional>
#include <set>

#include "text/tokenizers/added_tokens.h"
#include "text/tokenizers/decoder.h"
#include "text/tokenizers/json_fields.h"
#include "text/tokenizers/model.h"
#include "text/tokenizers/normalizer.h"
#include "text/tokenizers/post_processor.h"
#include "text/tokenizers/pre_tokenizer.h"
#include "text/tokenizers/vocabulary.h"
#include "text/tokenizers/word_cache.h"
#include "text/utf8.h"

namespace cohort {
namespace {

constexpr std::string_view kMetaspace = "\xe2\x96\x81";
constexpr const char* kEndOfText = "<|endoftext|>";

// A model's files by name.
class Folder {
 public:
  Folder(const NamedFiles& files, const std::string& where) : files_(files), where_(where) {}
  std::string path(const std::string& name) const { return where_ + "/" + name; }
  const std::string* find(const std::string& name) const { return find_file(files_, name); }
  // Null if the file does not exist.
  Json json(const std::string& name) const {
    const std::string* content = find(name);
    return content == nullptr ? Json() : parse_json(*content, path(name));
  }

 private:
  const NamedFiles& files_;
  const std::string& where_;
};

// Converts GPT-2's two files to a tokenizer.json.
Json gpt2_json(const Folder& folder) {
  const std::string* merges = folder.find("merges.txt");
  const Json byte_level = Json().set("type", "ByteLevel").set("add_prefix_space", false);
  Json::Array list;
  std::string_view rest = *merges;
  for (size_t number = 1; !rest.empty(); ++number) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    std::string_view line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty() || line.starts_with("#version")) continue;
    if (!is_utf8(line))
      throw InputError(str(folder.path("merges.txt"), ": line ", number, " is not UTF-8"));
    list.push_back(std::string(line));
  }
  return Json()
      .set("pre_tokenizer", byte_level)
      .set("decoder", byte_level)
      .set("model", Json()
                        .set("type", "BPE")
                        .set("vocab", folder.json("vocab.json"))
                        .set("merges", std::move(list)));
}

// Reads "TEXT" or {"content": "TEXT"}; nullopt for anything else.
std::optional<std::string> token_text(const Json& json) {
  const Json* text = json.is_object() ? json.find("content") : &json;
  if (text == nullptr || !text->is_string()) return {};
  return text->as_string();
}

class HuggingFaceTokenizer final : public Tokenizer {
 public:
  HuggingFaceTokenizer(NamedFiles files, const std::string& where);

  std::vector<int32_t> encode(std::string_view text, SpecialTokens special) const override;
  std::string decode(std::span<const int32_t> ids, SpecialText special) const override;
  std::unique_ptr<DecodeStream> decode_stream(SpecialText special) const override;
  int64_t vocab_size() const override { return vocabulary_.size(); }
  int32_t eos_id() const override;
  std::vector<int32_t> stop_ids() const override;
  NamedFiles files() const override;

 private:
  class Stream;
  struct EncodeCall;

  void read(const Json& json);
  std::vector<AddedToken> read_added_tokens(const Json& json, const Folder& folder) const;
  void add_tokens(std::vector<AddedToken> tokens);
  void find_eos(const Folder& folder);
  void find_stops(const Folder& folder);
  void encode_text(std::string_view text, bool starts_text, EncodeCall& call) const;
  void encode_word(std::string_view word, EncodeCall& call) const;
  void encode_part(std::string_view part, EncodeCall& call) const;
  // nullopt for an id without text.
  std::optional<std::string_view> text_of(int32_t id, SpecialText special) const;

  NamedFiles files_;
  Vocabulary vocabulary_;
  Normalizer normalizer_;
  PreTokenization pre_tokenization_;
  std::unique_ptr<Model> model_;
  bool splits_at_metaspace_ = false;
  AddedTokens added_;
  std::vector<int32_t> added_positions_;  // by id: the index in added_, or -1; may be shorter
  SurroundingTokens surrounding_;
  std::optional<Decoder> decoder_;
  std::optional<int32_t> eos_;
  std::vector<int32_t> stops_;  // eos_token_id of the model's files
  std::string where_;
  mutable WordCaches caches_;
};

HuggingFaceTokenizer::HuggingFaceTokenizer(NamedFiles files, const std::string& where)
    : files_(std::move(files)), where_(where) {
  const Folder folder(files_, where);
  const bool has_json = folder.find("tokenizer.json") != nullptr;
  const std::string name = has_json ? "tokenizer.json" : "vocab.json";
  const Json json = has_json ? folder.json(name) : gpt2_json(folder);
  with_places(json, folder.path(name), [&] {
    with_context(folder.path(name), [&] {
      read(json);
      add_tokens(read_added_tokens(json, folder));
    });
  });
  find_eos(folder);
  find_stops(folder);
}

void HuggingFaceTokenizer::read(const Json& json) {
  const Json& model = json.at("model");
  with_context("normalizer",
               [&] { normalizer_ = make_normalizer(value_or_null(json, "normalizer")); });
  with_context("pre_tokenizer", [&] {
    pre_tokenization_ =
        make_pre_tokenizer(value_or_null(json, "pre_tokenizer"), preferred_word_text(model));
  });
  with_context("model", [&] { model_ = make_model(model, pre_tokenization_.words, vocabulary_); });
  with_context("post_processor",
               [&] { surrounding_ = read_post_processor(value_or_null(json, "post_processor")); });
  with_context("decoder", [&] { decoder_.emplace(value_or_null(json, "decoder")); });
  splits_at_metaspace_ = model_->splits_before(kMetaspace);
}

std::vector<AddedToken> HuggingFaceTokenizer::read_added_tokens(const Json& json,
                                                                const Folder& folder) const {
  std::vector<AddedToken> tokens;
  std::set<std::string> seen;
  const auto add = [&](AddedToken token) {
    if (!token.content.empty() && seen.insert(token.content).second)
      tokens.push_back(std::move(token));
  };
  const Json& list = value_or_null(json, "added_tokens");
  if (!list.is_null())
    for (const Json& item : list.as_array()) add(read_added_token(item, item.at("id").as_int()));
  if (folder.find("tokenizer.json") != nullptr) return tokens;

  const Json config = folder.json("tokenizer_config.json");
  const Json& decoder = value_or_null(config, "added_tokens_decoder");
  if (!decoder.is_null())
    with_places(config, "tokenizer_config.json", [&] {
      for (const auto& [key, item] : decoder.as_object()) {
        const Json id = parse_json(key, "added_tokens_decoder");
        if (!id.is_int()) throw InputError(str("added_tokens_decoder: '", key, "' is no id"));
        add(read_added_token(item, id.as_int()));
      }
    });
  const Json added = folder.json("added_tokens.json");
  if (!added.is_null())
    with_places(added, "added_tokens.json", [&] {
      for (const auto& [content, id] : added.as_object())
        add({.content = content, .id = id.as_int(), .normalized = true});
    });
  if (const int32_t id = vocabulary_.find(kEndOfText); id >= 0)
    add({.content = kEndOfText, .id = id, .special = true});
  return tokens;
}

void HuggingFaceTokenizer::add_tokens(std::vector<AddedToken> tokens) {
  with_context("added_tokens", [&] {
    for (AddedToken& token : tokens) {
      vocabulary_.add(token.content, token.id);
      const auto id = static_cast<size_t>(token.id);
      if (added_positions_.size() <= id) added_positions_.resize(id + 1, -1);
      added_positions_[id] = static_cast<int32_t>(&token - tokens.data());
    }
    added_ = AddedTokens(std::move(tokens), normalizer_);
  });
}

void HuggingFaceTokenizer::find_eos(const Folder& folder) {
  for (const char* name : {"tokenizer_config.json", "special_tokens_map.json"}) {
    const Json json = folder.json(name);
    const std::optional<std::string> text = token_text(value_or_null(json, "eos_token"));
    if (!text) continue;
    const int32_t id = vocabulary_.find(*text);
    if (id < 0)
      throw InputError(
          str(folder.path(name), ": the eos_token ", excerpt(*text), " is not in the vocabulary"));
    eos_ = id;
    return;
  }
  for (const char* name : {"generation_config.json", "config.json"}) {
    const Json json = folder.json(name);
    const Json* id = json.find("eos_token_id");
    if (id != nullptr && id->is_array() && !id->as_array().empty()) id = &id->as_array()[0];
    if (id == nullptr || !id->is_int()) continue;
    if (id->as_int() < 0 || id->as_int() >= vocab_size())
      throw InputError(str(folder.path(name), ": the eos_token_id ", id->as_int(),
                           " is outside the vocabulary"));
    eos_ = static_cast<int32_t>(id->as_int());
    return;
  }
  for (const char* name : {kEndOfText, "</s>", "<|im_end|>"})
    if (const int32_t id = vocabulary_.find(name); id >= 0) {
      eos_ = id;
      return;
    }
}

int32_t HuggingFaceTokenizer::eos_id() const {
  if (!eos_)
    throw InputError(where_ +
                     ": the tokenizer names no end-of-sequence token; hint: write "
                     "{\"eos_token\": \"...\"} into tokenizer_config.json");
  return *eos_;
}

// Ids beyond the tokenizer's vocabulary are padding rows of the model, and ignored.
void HuggingFaceTokenizer::find_stops(const Folder& folder) {
  for (const char* name : {"generation_config.json", "config.json"}) {
    const Json json = folder.json(name);
    const Json* ids = json.find("eos_token_id");
    if (ids == nullptr || ids->is_null()) continue;
    with_places(json, folder.path(name), [&] {
      for (const Json& id : ids->is_array() ? std::span(ids->as_array()) : std::span(ids, 1))
        if (id.as_int() >= 0 && id.as_int() < vocab_size())
          stops_.push_back(static_cast<int32_t>(id.as_int()));
    });
    return;
  }
}

std::vector<int32_t> HuggingFaceTokenizer::stop_ids() const {
  std::vector<int32_t> ids{eos_id()};
  for (const int32_t id : stops_)
    if (std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
  return ids;
}

// Excludes config.json, which the model writes itself.
NamedFiles HuggingFaceTokenizer::files() const {
  NamedFiles kept = files_;
  std::erase_if(kept, [](const auto& file) { return file.first == "config.json"; });
  return kept;
}

struct HuggingFaceTokenizer::EncodeCall {
  std::vector<int32_t>& ids;
  WordCache& cache;
  Work work;
};

std::vector<int32_t> HuggingFaceTokenizer::encode(std::string_view text,
                                                  SpecialTokens special) const {
  if (const size_t valid = utf8_prefix(text); valid < text.size())
    throw InputError(
        str("byte ", valid, " is not part of UTF-8 text; hint: convert the text to UTF-8"));
  constexpr size_t kBytesPerToken = 4;  // in English; only sizes the reservation
  std::vector<int32_t> ids;
  if (special == SpecialTokens::kAdd) ids = surrounding_.before;
  ids.reserve(ids.size() + text.size() / kBytesPerToken + 16);
  const WordCaches::Lease cache(caches_);
  EncodeCall call{ids, *cache, Work(text.size())};
  added_.find_in_raw(text, [&](size_t begin, size_t end, const AddedToken* token) {
    if (token != nullptr)
      ids.push_back(static_cast<int32_t>(token->id));
    else
      encode_text(text.substr(begin, end - begin), begin == 0, call);
  });
  if (special == SpecialTokens::kAdd)
    ids.insert(ids.end(), surrounding_.after.begin(), surrounding_.after.end());
  return ids;
}

void HuggingFaceTokenizer::encode_text(std::string_view text, bool starts_text,
                                       EncodeCall& call) const {
  std::string normal;
  if (normalizer_) {
    normal = text;
    normalizer_(normal, call.work);
    text = normal;
  }
  const PieceSink sink = [&](Piece piece) { encode_word(piece.text, call); };
  added_.find_in_normalized(text, [&](size_t begin, size_t end, const AddedToken* token) {
    const Piece piece{text.substr(begin, end - begin), starts_text && begin == 0};
    if (token != nullptr)
      call.ids.push_back(static_cast<int32_t>(token->id));
    else if (pre_tokenization_.split)
      pre_tokenization_.split(piece, call.work, sink);
    else
      encode_word(piece.text, call);
  });
}

void HuggingFaceTokenizer::encode_word(std::string_view word, EncodeCall& call) const {
  if (!splits_at_metaspace_) return encode_part(word, call);
  // Without a pre-tokenizer the word may be the whole text.
  size_t begin = 0;
  for (size_t at = word.find(kMetaspace); at != word.npos;
       at = word.find(kMetaspace, at + kMetaspace.size())) {
    if (at > begin && !word.substr(0, at).ends_with(kMetaspace)) {
      encode_part(word.substr(begin, at - begin), call);
      begin = at;
    }
  }
  encode_part(word.substr(begin), call);
}

void HuggingFaceTokenizer::encode_part(std::string_view part, EncodeCall& call) const {
  if (const auto known = call.cache.find(part); !known.empty()) {
    call.ids.insert(call.ids.end(), known.begin(), known.end());
    return;
  }
  const size_t begin = call.ids.size();
  model_->encode(part, call.ids);
  call.cache.store(part, std::span(call.ids).subspan(begin));
}

std::optional<std::string_view> HuggingFaceTokenizer::text_of(int32_t id,
                                                              SpecialText special) const {
  if (id < 0 || static_cast<size_t>(id) >= added_positions_.size() ||
      added_positions_[static_cast<size_t>(id)] < 0)
    return vocabulary_.token(id);
  const auto position = static_cast<size_t>(added_positions_[static_cast<size_t>(id)]);
  if (special == SpecialText::kHide && added_.tokens()[position].special) return {};
  return added_.text(position);
}

class HuggingFaceTokenizer::Stream final : public DecodeStream {
 public:
  Stream(const HuggingFaceTokenizer& tokenizer, SpecialText special, size_t ids)
      : tokenizer_(tokenizer), special_(special), work_(ids), steps_(tokenizer.decoder_->start()) {}
  std::string push(int32_t id) override {
    work_.allow(1);
    const auto text = tokenizer_.text_of(id, special_);
    return text ? steps_.push(*text, work_) : std::string();
  }
  std::string peek() const override {
    Work work = work_;
    return steps_.peek(work);
  }
  void discard() override { steps_.discard(work_); }

 private:
  const HuggingFaceTokenizer& tokenizer_;
  SpecialText special_;
  Work work_;
  DecodeSteps steps_;
};

std::unique_ptr<DecodeStream> HuggingFaceTokenizer::decode_stream(SpecialText special) const {
  return std::make_unique<Stream>(*this, special, 0);
}

std::string HuggingFaceTokenizer::decode(std::span<const int32_t> ids, SpecialText special) const {
  Stream stream(*this, special, 0);
  std::string text;
  for (const int32_t id : ids) text += stream.push(id);
  return text + stream.peek();
}

}  // namespace

std::unique_ptr<Tokenizer> make_hugging_face_tokenizer(NamedFiles files, const std::string& where) {
  return std::make_unique<HuggingFaceTokenizer>(std::move(files), where);
}

}  // namespace cohort
