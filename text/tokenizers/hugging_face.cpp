// Encoding: added tokens of the raw text, normaliser, added tokens of the normalised text,
// pre-tokenizer, model, post-processor. Decoding: the decoder.
#include "text/tokenizers/hugging_face.h"

#include <algorithm>
#include <map>
#include <optional>

#include "text/tokenizers/added_tokens.h"
#include "text/tokenizers/byte_level.h"
#include "text/tokenizers/json_fields.h"
#include "text/tokenizers/pipeline.h"
#include "text/tokenizers/word_cache.h"
#include "text/unicode.h"

namespace cohort {
namespace {

constexpr std::string_view kMetaspace = "\xe2\x96\x81";
constexpr const char* kEndOfText = "<|endoftext|>";
constexpr const char* kBertTokens = R"({"unk_token": "[UNK]", "sep_token": "[SEP]",
  "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]"})";

// A model's files by name.
class Folder {
 public:
  Folder(const NamedFiles& files, const std::string& where) : files_(files), where_(where) {}
  std::string path(const std::string& name) const { return where_ + "/" + name; }
  const std::string* find(const std::string& name) const { return find_file(files_, name); }
  Json json(const std::string& name) const { return read_object(files_, name, path(name)); }

 private:
  const NamedFiles& files_;
  const std::string& where_;
};

// The file that has the vocabulary.
const char* main_file(const Folder& folder) {
  if (folder.find("tokenizer.json") != nullptr) return "tokenizer.json";
  return folder.find("vocab.json") && folder.find("merges.txt") ? "vocab.json" : "vocab.txt";
}

// Calls use(line) for the lines of a file, without their ends.
template <class Use>
void for_lines(const Folder& folder, const char* name, const Use& use) {
  std::string_view rest = *folder.find(name);
  for (size_t number = 1; !rest.empty(); ++number) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    std::string_view line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (!is_utf8(line))
      throw InputError(str(folder.path(name), ": line ", number, " is not UTF-8"));
    use(line);
  }
}

// Converts GPT-2's two files to a tokenizer.json.
Json gpt2_json(const Folder& folder) {
  const Json byte_level = Json().set("type", "ByteLevel").set("add_prefix_space", false);
  Json::Array list;
  for_lines(folder, "merges.txt", [&](std::string_view line) {
    if (!line.empty() && !line.starts_with("#version")) list.push_back(std::string(line));
  });
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
  const Json& text = json.is_object() ? json.get_or_null("content") : json;
  return text.is_string() ? std::optional(text.as_string()) : std::nullopt;
}

// Calls use(key, value) for the fields of a file, if it exists, with errors that name it.
template <class Use>
void for_fields(const Folder& folder, const char* name, const Use& use) {
  const Json json = folder.json(name);
  with_location(json, folder.path(name), [&] {
    with_context(folder.path(name), [&] {
      for (const auto& [key, value] : json.as_object()) use(key, value);
    });
  });
}

using TokensById = std::map<int64_t, AddedToken>;

// A special token that `file` names under `key`, as "TEXT" or {"content": "TEXT"}.
struct NamedToken {
  std::string file, key, text;
  Json json;
};

// The special tokens that files beside tokenizer.json name, in their order.
std::vector<NamedToken> named_tokens(const Folder& folder) {
  std::vector<NamedToken> out;
  for (const char* file : {"tokenizer_config.json", "special_tokens_map.json"})
    for_fields(folder, file, [&](const std::string& key, const Json& value) {
      const auto add = [&](const Json& token) {
        if (const auto text = token_text(token)) out.push_back({file, key, *text, token});
      };
      if (key.ends_with("_token")) add(value);
      if (!key.ends_with("_special_tokens")) return;
      if (value.is_array()) std::ranges::for_each(value.as_array(), add);
      if (value.is_object())
        for (const auto& [name, token] : value.as_object()) add(token);
    });
  const std::string_view main = main_file(folder);
  if (main == "vocab.json") out.push_back({"", "", kEndOfText, kEndOfText});
  const Json bert = parse_json(kBertTokens, "");
  for (const auto& [key, text] : bert.as_object())
    if (main == "vocab.txt" && std::ranges::count(out, key, &NamedToken::key) == 0)
      out.push_back({"", key, text.as_string(), text});
  return out;
}

// Rows of the model, if it says so.
int64_t rows_of(const Folder& folder) {
  const Json config = folder.json("config.json"), &size = config.get_or_null("vocab_size");
  return size.is_int() ? size.as_int() : INT64_MAX;
}

// Converts BERT's vocab.txt, whose line numbers are ids, to a tokenizer.json.
Json bert_json(const Folder& folder, std::span<const NamedToken> named) {
  const std::string path = folder.path("vocab.txt");
  TextMap<int64_t> ids;
  int64_t lines = 0;
  for_lines(folder, "vocab.txt", [&](std::string_view line) {
    if (lines == Vocabulary::kMaxIds)
      throw InputError(str(path, ": line ", lines + 1, ": expected at most ", lines, " lines"));
    ids[std::string(strip_if(line, Side::kRight, is_white_space))] = lines++;
  });
  const auto text_of = [&](const char* key) -> const std::string& {
    return std::ranges::find(named, key, &NamedToken::key)->text;
  };
  int64_t size = lines;
  for (const char* key : {"sep_token", "pad_token", "cls_token", "mask_token"})
    if (size < rows_of(folder) && !ids.contains(text_of(key))) ids[text_of(key)] = size++;
  const auto token = [&](const char* key) -> Json {
    const auto found = ids.find(text_of(key));
    if (found == ids.end())
      throw InputError(str(path, ": the ", key, " ", excerpt(text_of(key)), " is none of its ",
                           lines, " lines; hint: name it in tokenizer_config.json"));
    return Json::Array{found->first, found->second};
  };
  const Json config = folder.json("tokenizer_config.json");
  Json json = parse_json(R"({"normalizer": {"type": "BertNormalizer"},
    "pre_tokenizer": {"type": "BertPreTokenizer"}, "model": {"type": "WordPiece"},
    "post_processor": {"type": "BertProcessing"}, "decoder": {"type": "WordPiece"}})",
                         path);
  json["model"].set("unk_token", token("unk_token").as_array()[0]);
  json["model"].set("vocab", Json::Object(ids.begin(), ids.end()));
  json["post_processor"].set("cls", token("cls_token")).set("sep", token("sep_token"));
  Json& normalizer = json["normalizer"];  // its defaults are BERT's
  normalizer.set("lowercase", config.get_or_null("do_lower_case"));
  normalizer.set("strip_accents", config.get_or_null("strip_accents"));
  normalizer.set("handle_chinese_chars", config.get_or_null("tokenize_chinese_chars"));
  return json;
}

class HuggingFaceTokenizer final : public Tokenizer {
 public:
  HuggingFaceTokenizer(NamedFiles files, const std::string& where)
      : files_(std::move(files)), where_(where) {
    const Folder folder(files_, where);
    const std::vector<NamedToken> named = named_tokens(folder);
    const std::string name = main_file(folder);
    const Json json = name == "vocab.txt"    ? bert_json(folder, named)
                      : name == "vocab.json" ? gpt2_json(folder)
                                             : folder.json(name);
    TokensById tokens;
    with_location(json, folder.path(name), [&] {
      with_context(folder.path(name), [&] {
        read(json);
        const Json& list = json.get_or_null("added_tokens");
        if (list.is_null()) return;
        with_context("added_tokens", [&] {
          for (const Json& item : list.as_array()) {
            AddedToken token = read_added_token(item, item.at("id").as_int());
            if (!tokens.contains(vocabulary_.find(token.content))) add(std::move(token), tokens);
          }
        });
      });
    });
    read_other_files(folder, named, tokens);
    std::vector<AddedToken> all;
    for (auto& [id, token] : tokens) all.push_back(std::move(token));
    added_ = AddedTokens(std::move(all), normalizer_);
    find_eos(folder, named);
    find_stops(folder);
    find_control(named);
    find_mask(named);
    find_types(folder);
  }

  std::vector<int32_t> encode(std::string_view text, SpecialTokens special) const override {
    return special == SpecialTokens::kNone ? encode_with_plain(text, {}) : encode_texts(text).ids;
  }

  std::vector<int32_t> encode_with_plain(std::string_view text,
                                         const ByteRanges& plain) const override {
    if (const size_t valid = utf8_prefix(text); valid < text.size())
      throw InputError(
          str("byte ", valid, " is not part of UTF-8 text; hint: convert the text to UTF-8"));
    constexpr size_t kBytesPerToken = 4;  // in English; only sizes the reservation
    std::vector<int32_t> ids;
    ids.reserve(text.size() / kBytesPerToken + 16);
    const WordCache::Pool::Lease cache(caches_);
    EncodeCall call{ids, *cache, Work(text.size()), plain};
    added_.find_in_raw(text, plain, [&](size_t begin, size_t end, const AddedToken* token) {
      if (token != nullptr)
        ids.push_back(static_cast<int32_t>(token->id));
      else
        encode_text(text.substr(begin, end - begin), begin, call);
    });
    return ids;
  }

  std::string decode(std::span<const int32_t> ids, SpecialText special) const override {
    Stream stream(*this, special);
    std::string text;
    for (const int32_t id : ids) text += stream.push(id);
    return text + stream.peek();
  }

  std::unique_ptr<DecodeStream> decode_stream(SpecialText special) const override {
    return std::make_unique<Stream>(*this, special);
  }

  TextTemplates text_templates() const override { return templates_; }
  std::optional<int32_t> mask_id() const override { return mask_; }
  TokenText token_text(int32_t id) const override {
    const auto text = text_of(id, SpecialText::kHide);
    if (!text) return {};
    const bool is_added = added_.find(id) != nullptr;
    const std::string token(*text);
    if (const std::string_view prefix = model_->continuing_prefix(); !prefix.empty())
      return !is_added && token.starts_with(prefix) ? TokenText{token.substr(prefix.size()), true}
                                                    : TokenText{" " + token};
    const auto bytes = is_byte_level_ ? from_byte_characters(token) : std::nullopt;
    return {is_added ? token : bytes ? *bytes : replaced(token, kMetaspace, " ")};
  }

  int64_t vocab_size() const override { return vocabulary_.size(); }
  int32_t eos_id() const override {
    if (!eos_)
      throw InputError(where_ +
                       ": the tokenizer names no end-of-sequence token; hint: write "
                       "{\"eos_token\": \"...\"} into tokenizer_config.json");
    return *eos_;
  }

  std::vector<int32_t> stop_ids() const override {
    std::vector<int32_t> ids{eos_id()};
    for (const int32_t id : stops_)
      if (std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
    return ids;
  }

  // Excludes config.json, which the model writes itself.
  NamedFiles files() const override {
    NamedFiles kept = files_;
    std::erase_if(kept, [](const auto& file) { return file.first == "config.json"; });
    return kept;
  }

 private:
  class Stream final : public DecodeStream {
   public:
    Stream(const HuggingFaceTokenizer& tokenizer, SpecialText special)
        : tokenizer_(tokenizer), special_(special), decoder_(*tokenizer.decoder_) {}
    std::string push(int32_t id) override {
      work_.allow(1);
      const auto text = tokenizer_.text_of(id, special_);
      return text ? decoder_.push(*text, work_) : std::string();
    }
    std::string peek() const override {
      Work work = work_;
      return decoder_.peek(work);
    }
    void discard() override { decoder_.discard(work_); }

   private:
    const HuggingFaceTokenizer& tokenizer_;
    SpecialText special_;
    Work work_{0};
    Decoder decoder_;
  };

  struct EncodeCall {
    std::vector<int32_t>& ids;
    WordCache& cache;
    Work work;
    const ByteRanges& plain;  // in the whole text
  };

  void read(const Json& json) {
    const Json& model = json.at("model");
    const auto read_part = [&](const char* key, const auto& use) {
      with_context(key, [&] { use(json.get_or_null(key)); });
    };
    read_part("normalizer", [&](const Json& part) { normalizer_ = make_normalizer(part); });
    read_part("pre_tokenizer", [&](const Json& part) {
      pre_tokenization_ = make_pre_tokenizer(part, preferred_word_text(model));
    });
    read_part("model", [&](const Json& part) {
      model_ = make_model(part, pre_tokenization_.words, model_vocabulary_);
    });
    read_part("post_processor", [&](const Json& part) { templates_ = read_post_processor(part); });
    read_part("decoder", [&](const Json& part) { decoder_.emplace(part); });
    Work work{0};
    is_byte_level_ = Decoder(*decoder_).push(to_byte_characters(" "), work) == " ";
    splits_at_metaspace_ = model_->splits_before(kMetaspace);
  }

  void add(AddedToken token, TokensById& tokens) {
    if (token.content.empty()) return;
    vocabulary_.add(token.content, token.id);
    tokens[token.id] = std::move(token);
  }

  // Adds a token of a file beside tokenizer.json, or replaces what is known of it but for its id. A
  // new one whose id is taken gets the next one; without a row of the model it is none.
  void add_other(AddedToken token, int64_t rows, TokensById& tokens) {
    const int32_t known = vocabulary_.find(token.content);
    if (known >= 0)
      token.id = known;
    else if (token.id >= 0 && token.id < vocabulary_.size() &&
             vocabulary_.token(static_cast<int32_t>(token.id)))
      token.id = vocabulary_.size();
    if (known >= 0 || token.id < rows) add(std::move(token), tokens);
  }

  // Reads the tokens of the files beside tokenizer.json.
  void read_other_files(const Folder& folder, std::span<const NamedToken> named,
                        TokensById& tokens) {
    const int64_t rows = rows_of(folder);
    for_fields(folder, "tokenizer_config.json", [&](const std::string& key, const Json& decoder) {
      if (key != "added_tokens_decoder" || decoder.is_null()) return;
      for (const auto& [number, item] : decoder.as_object()) {
        const Json id = parse_json(number, key);
        if (!id.is_int()) throw InputError(str(key, ": '", number, "' is no id"));
        add_other(read_added_token(item, id.as_int()), rows, tokens);
      }
    });
    for_fields(folder, "added_tokens.json", [&](const std::string& content, const Json& id) {
      const bool is_special = std::ranges::count(named, content, &NamedToken::text) > 0;
      if (!tokens.contains(vocabulary_.find(content)))
        add_other({.content = content, .id = id.as_int(), .normalized = !is_special}, rows, tokens);
    });
    for (const NamedToken& token : named) {
      const int32_t id = vocabulary_.find(token.text);
      if (token.text.empty() || id < 0) continue;
      Json json = token.json.is_object() ? token.json : Json().set("content", token.text);
      if (!tokens.contains(id))
        with_location(json.set("special", true), str(folder.path(token.file), ": ", token.key),
                      [&] { add(read_added_token(json, id), tokens); });
      tokens[id].special = true;
    }
  }

  // As in transformers, texts have no other type than 0 if types are no input of the model.
  void find_types(const Folder& folder) {
    const Json inputs = folder.json("tokenizer_config.json").get_or_null("model_input_names");
    if (inputs.is_null() || inputs.dump().find("\"token_type_ids\"") != std::string::npos) return;
    for (EncodedText* parts : {&templates_.single, &templates_.pair})
      std::ranges::fill(parts->types, 0);
  }

  void find_eos(const Folder& folder, std::span<const NamedToken> named) {
    const auto token = std::ranges::find(named, "eos_token", &NamedToken::key);
    if (token == named.end()) return;
    eos_ = vocabulary_.find(token->text);
    if (*eos_ < 0)
      throw InputError(str(folder.path(token->file), ": the eos_token ", excerpt(token->text),
                           " is not in the vocabulary"));
  }

  // Ids beyond the tokenizer's vocabulary are padding rows of the model, and ignored. The first one
  // is the end of sequence if the tokenizer's files name none.
  void find_stops(const Folder& folder) {
    for (const char* name : {"generation_config.json", "config.json"}) {
      const Json json = folder.json(name);
      const Json* ids = json.find("eos_token_id");
      if (ids == nullptr || ids->is_null()) continue;
      with_location(json, folder.path(name), [&] {
        for (const Json& id : ids->is_array() ? std::span(ids->as_array()) : std::span(ids, 1))
          if (id.as_int() >= 0 && id.as_int() < vocab_size())
            stops_.push_back(static_cast<int32_t>(id.as_int()));
          else if (!eos_ && stops_.empty())
            throw InputError(str(folder.path(name), ": the eos_token_id ", id.as_int(),
                                 " is outside the vocabulary"));
      });
      break;
    }
    if (!eos_ && !stops_.empty()) eos_ = stops_[0];
    for (const char* name : {kEndOfText, "</s>", "<|im_end|>"})
      if (const int32_t id = vocabulary_.find(name); id >= 0 && !eos_) eos_ = id;
  }

  void find_control(std::span<const NamedToken> named) {
    control_ = stops_;
    if (eos_) control_.push_back(*eos_);
    for (const int32_t id : surrounding().before) control_.push_back(id);
    for (const NamedToken& token : named)
      if (token.key == "bos_token" || token.key == "pad_token" || token.key == "unk_token")
        control_.push_back(vocabulary_.find(token.text));
  }

  void find_mask(std::span<const NamedToken> named) {
    const auto token = std::ranges::find(named, "mask_token", &NamedToken::key);
    const auto use = [&](int32_t id) { mask_ = mask_ || !added_.find(id) ? mask_ : id; };
    if (token != named.end()) use(vocabulary_.find(token->text));
    for (const char* name : {"[MASK]", "<mask>"}) use(vocabulary_.find(name));
  }

  // The ranges of call.plain in the part of the text that begins at `offset`, once normalised: a
  // boundary is where the text before it ends.
  ByteRanges plain_ranges(std::string_view part, size_t offset, const EncodeCall& call) const {
    ByteRanges out;
    const auto local = [&](size_t at) {
      at = std::min(std::max(at, offset) - offset, part.size());
      if (!normalizer_) return at;
      std::string before(part.substr(0, at));
      Work work(at);
      normalizer_(before, work);
      return before.size();
    };
    for (auto range = first_range(call.plain, offset);
         range != call.plain.end() && range->first < offset + part.size(); ++range)
      if (const size_t begin = local(range->first), end = local(range->second); begin < end)
        out.emplace_back(begin, end);
    return out;
  }

  void encode_text(std::string_view text, size_t offset, EncodeCall& call) const {
    const ByteRanges plain = plain_ranges(text, offset, call);
    std::string normal;
    if (normalizer_) {
      normal = text;
      normalizer_(normal, call.work);
      text = normal;
    }
    const PieceSink sink = [&](Piece piece) { encode_word(piece.text, call); };
    added_.find_in_normalized(text, plain, [&](size_t begin, size_t end, const AddedToken* token) {
      const Piece piece{text.substr(begin, end - begin), offset == 0 && begin == 0};
      if (token != nullptr)
        call.ids.push_back(static_cast<int32_t>(token->id));
      else if (pre_tokenization_.split)
        pre_tokenization_.split(piece, call.work, sink);
      else
        encode_word(piece.text, call);
    });
  }

  void encode_word(std::string_view word, EncodeCall& call) const {
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

  void encode_part(std::string_view part, EncodeCall& call) const {
    if (const auto known = call.cache.find(part); !known.empty()) {
      call.ids.insert(call.ids.end(), known.begin(), known.end());
      return;
    }
    const size_t begin = call.ids.size();
    model_->encode(part, call.ids);
    call.cache.store(part, std::span(call.ids).subspan(begin));
  }

  // nullopt for an id without text.
  std::optional<std::string_view> text_of(int32_t id, SpecialText special) const {
    const AddedToken* added = added_.find(id);
    if (added == nullptr) return vocabulary_.token(id);
    const bool hidden = special == SpecialText::kHide || (special == SpecialText::kHideControl &&
                                                          std::ranges::count(control_, id) > 0);
    if (added->special && hidden) return {};
    return added->content;
  }

  NamedFiles files_;
  Vocabulary model_vocabulary_, vocabulary_{&model_vocabulary_};  // the model finds no added token
  Normalizer normalizer_;
  PreTokenization pre_tokenization_;
  std::unique_ptr<Model> model_;
  bool splits_at_metaspace_ = false;
  AddedTokens added_;
  TextTemplates templates_;
  bool is_byte_level_ = false;
  std::optional<Decoder> decoder_;
  std::optional<int32_t> eos_, mask_;
  std::vector<int32_t> stops_;    // eos_token_id of the model's files
  std::vector<int32_t> control_;  // SpecialText::kHideControl
  std::string where_;
  mutable WordCache::Pool caches_;
};

}  // namespace

std::unique_ptr<Tokenizer> make_hugging_face_tokenizer(NamedFiles files, const std::string& where) {
  return std::make_unique<HuggingFaceTokenizer>(std::move(files), where);
}

NamedFiles tokenizer_files(TokenizerParts parts) {
  Json model = parse_json(parts.model, "model"), added = Json::Array{};
  model.set("vocab", std::move(parts.vocabulary));
  if (!parts.merges.is_null()) model.set("merges", std::move(parts.merges));
  for (const auto& [text, id] : parts.special) {
    Json token = Json().set("id", id).set("content", text);
    for (const char* option : {"single_word", "lstrip", "rstrip", "normalized"})
      token.set(option, false);
    added.push_back(token.set("special", true));
  }
  const Json json = Json()
                        .set("version", "1.0")
                        .set("truncation", Json())
                        .set("padding", Json())
                        .set("added_tokens", std::move(added))
                        .set("normalizer", Json())
                        .set("pre_tokenizer", parse_json(parts.pre_tokenizer, "pre_tokenizer"))
                        .set("post_processor", parse_json(parts.post_processor, "post_processor"))
                        .set("decoder", parse_json(parts.decoder, "decoder"))
                        .set("model", std::move(model));
  const Json config = Json()
                          .set("tokenizer_class", "PreTrainedTokenizerFast")
                          .set("eos_token", parts.special.at(0).first)
                          .set("clean_up_tokenization_spaces", false);
  return {{"tokenizer.json", json.dump(parts.indent) + "\n"},
          {"tokenizer_config.json", config.dump(2) + "\n"}};
}

}  // namespace cohort
