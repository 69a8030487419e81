// Tokenizers in Hugging Face's formats: published ids, round trips, streams, damaged and hostile
// files. Real files are tested if the data folder exists.
#include <filesystem>
#include <fstream>

#include "core/rng.h"
#include "sys/input_file.h"
#include "tests/support/byte_fallback.h"
#include "tests/support/test_util.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"
#include "text/tokenizers/hugging_face.h"
#include "text/utf8.h"

namespace cohort {
namespace {

using Ids = std::vector<int32_t>;

// A small byte-level tokenizer: the bytes that are ASCII, "he", "hel", "Ġw", two added tokens.
Json small_json() {
  Json::Object vocab;
  int64_t id = 0;
  for (char c = '!'; c <= '~'; ++c) vocab.emplace_back(std::string(1, c), id++);
  for (const char* token : {"Ġ", "he", "hel", "Ġw", "Ã", "©"}) vocab.emplace_back(token, id++);
  const Json merges = Json::Array{"h e", Json::Array{"he", "l"}, "Ġ w"};
  const Json added = Json::Array{
      Json().set("id", id).set("content", "<end>").set("special", true),
      Json().set("id", id + 1).set("content", "<t>").set("special", false).set("lstrip", true)};
  return Json()
      .set("added_tokens", added)
      .set("pre_tokenizer", Json().set("type", "ByteLevel").set("add_prefix_space", false))
      .set("decoder", Json().set("type", "ByteLevel"))
      .set("model",
           Json().set("type", "BPE").set("vocab", Json(std::move(vocab))).set("merges", merges));
}

std::unique_ptr<Tokenizer> make_small(const Json& json = small_json(), NamedFiles more = {}) {
  more.emplace_back("tokenizer.json", json.dump());
  return make_tokenizer(std::move(more), "folder");
}

TEST(TokenizerFiles, EncodesAddedTokensAndWords) {
  const auto tokenizer = make_small();
  const Ids ids = tokenizer->encode("hello  <t> wé<end>");
  // he+l l o; <t> with the spaces before it; Ġw, the two bytes of é.
  EXPECT_EQ(ids, (Ids{96, 'l' - '!', 'o' - '!', 101, 97, 98, 99, 100}));
  EXPECT_EQ(tokenizer->decode(ids), "hello<t> wé");
  EXPECT_EQ(tokenizer->decode(ids, SpecialText::kShow), "hello<t> wé<end>");
  EXPECT_EQ(tokenizer->vocab_size(), 102);
  EXPECT_TRUE(tokenizer->encode("").empty());
  EXPECT_EQ(tokenizer->decode(Ids{-1, 5000, 96}), "hel");
  EXPECT_THROW_WITH(tokenizer->encode("a\xff"), InputError, "byte 1 is not part of UTF-8");
}

// An added token that no part of the text is, as it must be a word of its own, is no word of the
// model either: the ids are those of `tokenizers`.
TEST(TokenizerFiles, ModelsFindNoAddedTokens) {
  const std::tuple<const char*, Ids> cases[] = {
      {R"("type": "WordLevel", "unk_token": "?", "vocab": {"?": 0, "1": 1})", {0, 1}},
      {R"("type": "WordPiece", "unk_token": "?", "vocab": {"?": 0, "1": 1})", {0, 1}},
      {R"("type": "Unigram", "unk_id": 0, "vocab": [["?", 0], ["1", -1]])", {0, 1}},
      {R"("type": "BPE", "ignore_merges": true, "merges": [],
          "vocab": {"?": 0, "1": 1, "t": 2, "o": 3, "l": 4})",
       {2, 3, 3, 4, 1}}};
  for (const auto& [model, expected] : cases) {
    const std::string json =
        str(R"({"added_tokens": [{"id": 9, "content": "tool", "single_word": true}],
                "pre_tokenizer": {"type": "Digits"}, "model": {)",
            model, "}}");
    const auto tokenizer = make_tokenizer({{"tokenizer.json", json}}, "folder");
    EXPECT_EQ(tokenizer->encode("tool"), Ids{9}) << model;
    EXPECT_EQ(tokenizer->encode("tool1"), expected) << model;
    EXPECT_EQ(tokenizer->decode(Ids{9}), "tool");
    EXPECT_EQ(tokenizer->vocab_size(), 10);
  }
}

TEST(TokenizerFiles, WhiteSpaceThatATokenTookIsNoOtherToken) {
  Json json = small_json();
  json.set("added_tokens",
           parse_json(R"([{"id": 100, "content": "\n", "lstrip": true, "rstrip": true},
                          {"id": 101, "content": "<t>", "rstrip": true}])",
                      "json"));
  const auto tokenizer = make_small(json);
  EXPECT_EQ(tokenizer->encode("\n \n\n<t>  \n!\n"), (Ids{100, 101, 0, 100}));
}

// The text of `ids` after a prompt, by pushing them one by one.
std::string text_after(const Tokenizer& tokenizer, const Ids& prompt, const Ids& ids) {
  StreamDecoder stream(tokenizer, prompt);
  std::string text;
  for (const int32_t id : ids) text += stream.push(id);
  EXPECT_EQ(stream.peek(), stream.peek());  // changes nothing
  return text + stream.peek();
}

TEST(TokenizerFiles, TheTextAfterAPromptHasNothingOfThePromptsLastByte) {
  const auto tokenizer = test::byte_fallback_tokenizer();
  const Ids word = tokenizer->encode("ab"), line = tokenizer->encode("\n"),
            you = {test::byte_token(0xe4), test::byte_token(0xbd), test::byte_token(0xa0)};
  ASSERT_EQ(tokenizer->decode(you), "你");
  for (unsigned byte = 0; byte < 256; ++byte) {
    SCOPED_TRACE(byte);
    for (const Ids& before : {Ids{1}, word, Ids{test::byte_token('\n')}, Ids{}}) {
      Ids prompt = before;
      prompt.push_back(test::byte_token(byte));
      EXPECT_EQ(text_after(*tokenizer, prompt, {}), "");
      EXPECT_EQ(text_after(*tokenizer, prompt, {260, 261}), "ab");
      EXPECT_EQ(text_after(*tokenizer, prompt, {262}), " a");
      EXPECT_EQ(text_after(*tokenizer, prompt, {test::byte_token('\n')}), "\n");
      EXPECT_EQ(text_after(*tokenizer, prompt, {test::byte_token('\n'), 260}), "\na");
      EXPECT_EQ(text_after(*tokenizer, prompt, you), "你");
      // An invalid byte of the completion stays an error of the completion.
      EXPECT_EQ(text_after(*tokenizer, prompt, {test::byte_token(0xff), 260}), "\ufffda");
      EXPECT_EQ(text_after(*tokenizer, prompt, {2}), "");
    }
  }
  // A character that began in the prompt is complete if the completion finishes it.
  const Ids begun = {260, test::byte_token('\n'), you[0]};
  EXPECT_EQ(text_after(*tokenizer, begun, {you[1], you[2], 261}), "你b");
  EXPECT_EQ(text_after(*tokenizer, begun, {you[1], you[2], test::byte_token('\n')}), "你\n");
  EXPECT_EQ(text_after(*tokenizer, begun, {you[1], 261}), "\ufffdb");
}

TEST(TokenizerFiles, TheTextAfterBytesOfOtherTokenizersHasNothingOfThem) {
  const auto bytes = make_byte_tokenizer();
  EXPECT_EQ(text_after(*bytes, {0xe4}, {'x'}), "x");
  EXPECT_EQ(text_after(*bytes, {0xe4}, {0xbd, 0xa0, 'x'}), "你x");
  EXPECT_EQ(text_after(*bytes, {0xe4, 0xbd}, {}), "");
  EXPECT_EQ(text_after(*bytes, {0xe4}, {0xbd}), "\xbd");
  const auto small = make_small();  // 98 and 99 are the two bytes of an e with an acute accent
  EXPECT_EQ(text_after(*small, {98}, {99, 96}), "éhel");
  EXPECT_EQ(text_after(*small, {98}, {96}), "hel");
  EXPECT_EQ(text_after(*small, {96, 98}, {98, 99}), "é");
}

// Tokens that begin, end or pad texts, by any of the files that name them.
TEST(TokenizerFiles, ControlTokensAreHiddenBesideOthers) {
  Json json = small_json();
  Json::Array added = json.at("added_tokens").as_array();
  int64_t id = 102;
  for (const char* text : {"<think>", "<s>", "<pad>", "<eot>", "<begin>", "<unk>"})
    added.push_back(Json().set("id", id++).set("content", text).set("special", true));
  json.set("added_tokens", std::move(added));
  json.set("post_processor",
           parse_json(R"({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id":
             "<begin>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
             "special_tokens": {"<begin>": {"id": "<begin>", "ids": [106], "tokens":
             ["<begin>"]}}})",
                      "post_processor"));
  const auto tokenizer = make_small(
      json,
      {{"tokenizer_config.json", R"({"eos_token": "<end>", "unk_token": "<unk>"})"},
       {"special_tokens_map.json", R"({"bos_token": {"content": "<s>"}, "pad_token": "<pad>"})"},
       {"generation_config.json", R"({"eos_token_id": [100, 105]})"}});
  const Ids ids = tokenizer->encode("<begin><s><think>hel<t><unk>l<pad><eot><end>");
  EXPECT_EQ(tokenizer->decode(ids, SpecialText::kHideControl), "<think>hel<t>l");
  EXPECT_EQ(tokenizer->decode(ids), "hel<t>l");
  EXPECT_EQ(tokenizer->decode(ids, SpecialText::kShow),
            "<begin><s><think>hel<t><unk>l<pad><eot><end>");
}

TEST(TokenizerFiles, FindsTheEndOfSequence) {
  EXPECT_THROW_WITH(make_small()->eos_id(), InputError, "tokenizer_config.json");
  const auto with = [](const char* name, const char* text) {
    return make_small(small_json(), {{name, text}})->eos_id();
  };
  EXPECT_EQ(with("tokenizer_config.json", R"({"eos_token":"<end>"})"), 100);
  EXPECT_EQ(with("tokenizer_config.json", R"({"eos_token":{"content":"<t>"}})"), 101);
  EXPECT_EQ(with("special_tokens_map.json", R"({"eos_token":"<end>"})"), 100);
  EXPECT_EQ(with("generation_config.json", R"({"eos_token_id":[7,8]})"), 7);
  EXPECT_EQ(with("config.json", R"({"eos_token_id":9})"), 9);
  EXPECT_THROW_WITH(with("tokenizer_config.json", R"({"eos_token":"no"})"), InputError,
                    "folder/tokenizer_config.json: the eos_token 'no' is not in the vocabulary");
  EXPECT_THROW_WITH(with("config.json", R"({"eos_token_id":900})"), InputError, "outside");
}

// small_json() with the tokens <stop> (102) and <new> (103) of the vocabulary, which it does not
// split off, in other files. The ids and texts are those of AutoTokenizer (transformers 5.24).
TEST(TokenizerFiles, TokensThatOtherFilesNameAreMatchedWhole) {
  Json json = small_json();
  Json vocab = json.at("model").at("vocab");
  json["model"].set("vocab", vocab.set("<stop>", 102));
  const auto ids = [&](NamedFiles files, const char* text = "he<stop>he") {
    return make_small(json, std::move(files))->encode(text);
  };
  const auto shown = [&](NamedFiles files, const char* text = "he<stop>he") {
    const auto tokenizer = make_small(json, std::move(files));
    return tokenizer->decode(tokenizer->encode(text));
  };
  const Ids whole{95, 102, 95};
  ASSERT_EQ(ids({}).size(), 8u);
  for (const char* name : {"tokenizer_config.json", "special_tokens_map.json"})
    for (const char* fields :
         {R"({"eos_token": "<stop>"})", R"({"pad_token": {"content": "<stop>"}})",
          R"({"eos_token": {"content": "<stop>", "special": false}})",
          R"({"image_token": "<stop>"})", R"({"additional_special_tokens": ["<stop>"]})",
          R"({"additional_special_tokens": [{"content": "<stop>"}, "no"], "eos_token": null})",
          R"({"extra_special_tokens": ["<stop>"]})",
          R"({"extra_special_tokens": {"image_token": "<stop>"}})",
          R"({"model_specific_special_tokens": {"image_token": "<stop>"}})"}) {
      SCOPED_TRACE(str(name, " ", fields));
      EXPECT_EQ(ids({{name, fields}}), whole);
      EXPECT_EQ(shown({{name, fields}}), "hehe");
    }
  const auto decoder = [](const char* entry) {
    return NamedFiles{{"tokenizer_config.json", str("{\"added_tokens_decoder\": {", entry, "}}")}};
  };
  const auto stop = decoder(R"("102": {"content": "<stop>", "special": true})"),
             plain = decoder(R"("102": {"content": "<stop>", "special": false})");
  EXPECT_EQ(ids(stop), whole);
  EXPECT_EQ(shown(stop), "hehe");
  EXPECT_EQ(ids(plain), whole);
  EXPECT_EQ(shown(plain), "he<stop>he");
  EXPECT_EQ(ids({{"added_tokens.json", R"({"<stop>": 102})"}}), whole);
  EXPECT_EQ(shown({{"added_tokens.json", R"({"<stop>": 102})"}}), "he<stop>he");
  EXPECT_EQ(shown({{"added_tokens.json", R"({"<stop>": 102})"},
                   {"special_tokens_map.json", R"({"eos_token": "<stop>"})"}}),
            "hehe");
  // A new token; one whose id is taken gets the next.
  for (const char* id : {"103", "99"}) {
    const auto added =
        decoder(str("\"", id, R"(": {"content": "<new>", "special": true})").c_str());
    EXPECT_EQ(ids(added, "he<new>"), (Ids{95, 103}));
    EXPECT_EQ(make_small(json, added)->vocab_size(), 104);
  }
  // The flags of tokenizer_config.json replace those of tokenizer.json; a name changes none.
  const auto t = decoder(R"("101": {"content": "<t>", "special": true})");
  EXPECT_EQ(ids(t, "he <t>he"), (Ids{95, 94, 101, 95}));
  EXPECT_EQ(shown(t, "he <t>he"), "he he");
  const NamedFiles named{{"tokenizer_config.json", R"({"eos_token": "<t>"})"}};
  EXPECT_EQ(ids(named, "he <t>he"), (Ids{95, 101, 95}));
  EXPECT_EQ(shown(named, "he <t>he"), "hehe");
  // A token without a row of the model, as folders have whose embeddings were not resized, is none.
  for (const auto& [rows, size] : {std::pair(103, 103), {104, 104}}) {
    NamedFiles files = decoder(R"("103": {"content": "<pad>", "special": true})");
    files.emplace_back("config.json", str("{\"vocab_size\": ", rows, "}"));
    EXPECT_EQ(make_small(json, files)->vocab_size(), size);
  }
}

TEST(TokenizerFiles, DamagedNamesOfTokensAreInputErrors) {
  for (const auto& [name, content, text] :
       {std::tuple{"tokenizer_config.json", "[]", "tokenizer_config.json: expected an object"},
        {"tokenizer_config.json", R"({"added_tokens_decoder": {"x": {"content": "y"}}})", "folder"},
        {"tokenizer_config.json", R"({"added_tokens_decoder": {"1.5": {"content": "y"}}})",
         "folder/tokenizer_config.json: added_tokens_decoder: '1.5' is no id"},
        {"tokenizer_config.json", R"({"added_tokens_decoder": {"7": {"content": 3}}})",
         "folder/tokenizer_config.json: added_tokens_decoder.7.content: expected text"},
        {"tokenizer_config.json", R"({"added_tokens_decoder": {"-7": {"content": "y!"}}})",
         "has the id -7"},
        {"added_tokens.json", R"({"<x>": 9000000000000})", "has the id 9000000000000"},
        {"added_tokens.json", R"({"<x>": "7"})", "folder/added_tokens.json: <x>: expected a whole"},
        {"special_tokens_map.json", "3", "special_tokens_map.json: expected an object"}})
    EXPECT_THROW_WITH(make_small(small_json(), {{name, content}}), InputError, text);
  // Values of other types name no token.
  for (const char* fields : {R"({"eos_token": 3, "pad_token": [], "bos_token": {"content": 1}})",
                             R"({"additional_special_tokens": 3, "extra_special_tokens": [null]})"})
    EXPECT_EQ(make_small(small_json(), {{"tokenizer_config.json", fields}})->vocab_size(), 102);
}

// A model of bytes or characters becomes a chat model by a template in its folder.
TEST(TokenizerFiles, ATemplateBesideBytesOrCharactersIsKept) {
  for (const auto& plain : {make_byte_tokenizer(), make_char_tokenizer("abc é\n")}) {
    NamedFiles files = plain->files();
    files.emplace_back("chat_template.jinja", "{{ messages[0].content }}");
    const auto chat = make_tokenizer(files, "folder");
    EXPECT_EQ(find_chat_template(chat->files()), "{{ messages[0].content }}");
    EXPECT_EQ(chat->encode("abc é\nc"), plain->encode("abc é\nc"));
    EXPECT_EQ(chat->decode(plain->encode("b é\n")), "b é\n");
    EXPECT_EQ(chat->vocab_size(), plain->vocab_size());
    EXPECT_EQ(chat->stop_ids(), plain->stop_ids());
  }
}

TEST(TokenizerFiles, ComeBackByteForByte) {
  const test::TempDir dir;
  const std::string json = small_json().dump(3) + "\n \n";
  test::write_file(dir.path("tokenizer.json"), json);
  test::write_file(dir.path("tokenizer_config.json"), "{\"eos_token\" : \"<end>\"}");
  test::write_file(dir.path("chat_template.jinja"), "{{ x }}");
  test::write_file(dir.path("other.txt"), "x");
  const NamedFiles expected = {{"tokenizer.json", json},
                               {"tokenizer_config.json", "{\"eos_token\" : \"<end>\"}"},
                               {"chat_template.jinja", "{{ x }}"}};
  EXPECT_EQ(load_tokenizer(dir.path())->files(), expected);
}

TEST(TokenizerFiles, PostProcessorAddsTokens) {
  const Json pieces =
      Json::Array{Json().set("SpecialToken", Json().set("id", "b").set("type_id", 0)),
                  Json().set("Sequence", Json().set("id", "A").set("type_id", 0)),
                  Json().set("SpecialToken", Json().set("id", "e").set("type_id", 0))};
  const Json ids = Json()
                       .set("b", Json().set("ids", Json::Array{101}))
                       .set("e", Json().set("ids", Json::Array{100, 100}));
  const auto tokenizer = make_small(small_json().set(
      "post_processor",
      Json().set("type", "TemplateProcessing").set("single", pieces).set("special_tokens", ids)));
  EXPECT_EQ(tokenizer->encode("a", SpecialTokens::kAdd), (Ids{101, 'a' - '!', 100, 100}));
  EXPECT_EQ(tokenizer->encode("a"), (Ids{'a' - '!'}));
}

TEST(TokenizerFiles, DamagedFilesAreInputErrors) {
  const std::string good = small_json().dump();
  for (size_t size = 0; size < good.size(); size += 7)
    EXPECT_THROW(make_tokenizer({{"tokenizer.json", good.substr(0, size)}}, "x"), InputError);
  const auto refused = [](Json json, const char* text) {
    EXPECT_THROW_WITH(make_small(json), InputError, text);
  };
  const auto with = [](const char* part, const char* key, Json value) {
    Json json = small_json();
    json[part].set(key, std::move(value));
    return json;
  };
  refused(with("model", "merges", Json::Array{"a"}),
          "folder/tokenizer.json: model: merges: merge 0");
  refused(with("model", "merges", Json::Array{"h q q"}), "one space");
  refused(with("model", "merges", Json::Array{"h zz"}), "'zz' is not in the vocabulary");
  refused(with("model", "merges", Json::Array{"z z"}), "'zz' is not in the vocabulary");
  refused(with("model", "merges", Json(3)), "expected a list");
  refused(with("model", "vocab", Json().set("a", -1)), "the token 'a' has the id -1");
  refused(with("model", "vocab", Json().set("a", int64_t{1} << 40)), "has the id 1099511627776");
  refused(with("model", "vocab", Json().set("a", 1).set("b", 1)), "the id 1 is that of 'a'");
  refused(with("model", "vocab", Json().set("a", 1.5)), "whole number");
  refused(with("model", "dropout", 0.1), "dropout");
  refused(with("model", "type", "LSTM"), "unknown model 'LSTM'; known: BPE");
  refused(with("pre_tokenizer", "type", "No"), "pre_tokenizer: unknown pre_tokenizer 'No'");
  refused(with("decoder", "type", "No"), "decoder: unknown decoder 'No'");
  refused(small_json().set("added_tokens", Json::Array{Json().set("id", 3).set("content", "new")}),
          "added_tokens: the id 3 is that of '$' and of 'new'");
}

TEST(TokenizerFiles, FoldersWithoutATokenizerSayWhatIsMissing) {
  const test::TempDir dir;
  EXPECT_THROW_WITH(load_tokenizer(dir.path("no")), InputError, "is not a folder");
  EXPECT_THROW_WITH(load_tokenizer(dir.path()), InputError, "hint: tokenizer.json is needed");
  test::write_file(dir.path("vocab.json"), "{\"a\":0,\"b\":1,\"ab\":2}");
  EXPECT_THROW_WITH(load_tokenizer(dir.path()), InputError, "has no tokenizer");
  test::write_file(dir.path("merges.txt"), "#version: 0.2\na b\n");
  EXPECT_EQ(load_tokenizer(dir.path())->encode("abba"), (Ids{2, 1, 0}));
}

TEST(TokenizerFiles, OneWordOfAMillionLettersIsNotQuadratic) {
  const auto tokenizer = make_small();
  std::string text;
  for (int i = 0; i < 250'000; ++i) text += "hell";
  const Ids ids = tokenizer->encode(text);
  EXPECT_EQ(ids.size(), 500'000u);
  EXPECT_TRUE(tokenizer->decode(ids) == text);
}

// ---- Real files --------------------------------------------------------------------------------

std::string folder_of(const std::string& data, const std::string& name) {
  if (name == "gpt-2" || name == "gpt2" || name == "distilgpt2") return data + "/tokenizers/gpt2";
  return data + "/tokenizers/" + (name == "qwen2" ? "qwen2.5" : "llama2");
}

Ids ids_of(const Json& list) {
  Ids ids;
  for (const Json& id : list.as_array()) ids.push_back(static_cast<int32_t>(id.as_int()));
  return ids;
}

class RealTokenizers : public testing::Test {
 protected:
  const Tokenizer& load(const std::string& folder) {
    auto& tokenizer = tokenizers_[folder];
    if (!tokenizer) tokenizer = load_tokenizer(folder);
    return *tokenizer;
  }
  std::map<std::string, std::unique_ptr<Tokenizer>> tokenizers_;
};

// The text of a stream.
std::string streamed(const Tokenizer& tokenizer, const Ids& ids) {
  StreamDecoder stream(tokenizer);
  std::string text;
  for (const int32_t id : ids) text += stream.push(id);
  return text + stream.peek();
}

TEST_F(RealTokenizers, GiveThePublishedIds) {
  COHORT_REQUIRE_DATA(dir);
  std::ifstream file(dir + "/tokenizers/truth.jsonl");
  int rows = 0;
  for (std::string line; std::getline(file, line); ++rows) {
    const Json row = parse_json(line, "truth.jsonl");
    const Tokenizer& tokenizer = load(folder_of(dir, row.at("tokenizer").as_string()));
    const auto special =
        row.at("add_special").as_bool() ? SpecialTokens::kAdd : SpecialTokens::kNone;
    EXPECT_EQ(tokenizer.encode(row.at("text").as_string(), special), ids_of(row.at("ids"))) << line;
  }
  EXPECT_EQ(rows, 111);
  EXPECT_EQ(load(folder_of(dir, "gpt2")).eos_id(), 50256);
  EXPECT_EQ(load(folder_of(dir, "qwen2")).eos_id(), 151645);
  EXPECT_EQ(load(folder_of(dir, "llama2")).eos_id(), 2);
}

TEST_F(RealTokenizers, StoriesModelsCasesAndItsGoldenText) {
  COHORT_REQUIRE_DATA(dir);
  const std::string folder = dir + "/models/stories260K";
  const Json golden = parse_json(test::read_file(folder + "/golden.json"), "golden.json");
  const Tokenizer& tokenizer = load(folder);
  for (const Json& row : golden.at("tokenizer_cases").as_array()) {
    const std::string& text = row.at("text").as_string();
    EXPECT_EQ(tokenizer.encode(text), ids_of(row.at("ids")));
    EXPECT_EQ(tokenizer.decode(ids_of(row.at("ids"))), text);
  }
}

TEST_F(RealTokenizers, StreamsGiveWhatDecodeGives) {
  COHORT_REQUIRE_DATA(dir);
  const uint64_t stream = rng_stream(kTestPurpose, 3);
  for (const char* name : {"tokenizers/gpt2", "tokenizers/llama2", "tokenizers/qwen2.5",
                           "tokenizers/phi-2", "tokenizers/minimind", "models/stories260K"}) {
    const Tokenizer& tokenizer = load(dir + "/" + name);
    const auto rows = static_cast<uint32_t>(tokenizer.vocab_size() + 5);
    for (uint64_t i = 0; i < 2000; ++i) {
      Ids ids;
      for (uint64_t j = 0; j < i % 12; ++j) {
        const auto random = philox(1, stream, i * 16 + j);
        // Half of the ids come from the beginning of the vocabulary, which has the bytes.
        ids.push_back(static_cast<int32_t>(random[0] % (random[1] % 2 == 0 ? 300u : rows)));
      }
      const std::string text = tokenizer.decode(ids);
      ASSERT_EQ(streamed(tokenizer, ids), text);
      ASSERT_TRUE(is_utf8(text));
    }
  }
}

// For every split of a text into prompt and completion, the text of the completion is the rest,
// including a character that crosses the boundary.
TEST_F(RealTokenizers, TheTextAfterAPromptIsTheRestOfTheText) {
  COHORT_REQUIRE_DATA(dir);
  const std::vector<std::string> texts = {"User: hi\n\nAssistant:\n\n\n x",
                                          "你好\n世界\t🙂 e\u0301\n",
                                          " a  b\n \n<|end|>\r\n.", "\n"};
  int splits = 0;
  for (const char* name : {"tokenizers/gpt2", "tokenizers/llama2", "tokenizers/qwen2.5",
                           "tokenizers/phi-2", "tokenizers/minimind", "models/stories260K"}) {
    const Tokenizer& tokenizer = load(dir + "/" + name);
    for (const std::string& text : texts) {
      const Ids ids = tokenizer.encode(text);
      const std::string whole = tokenizer.decode(ids);
      for (size_t i = 1; i <= ids.size(); ++i, ++splits) {
        const Ids prompt(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(i)),
            rest(ids.begin() + static_cast<std::ptrdiff_t>(i), ids.end());
        const std::string before = tokenizer.decode(prompt),
                          after = text_after(tokenizer, prompt, rest);
        ASSERT_TRUE(whole.ends_with(after)) << name << ": " << text << " at " << i;
        if (whole.starts_with(before)) {
          EXPECT_EQ(after, whole.substr(before.size())) << name << ": " << text << " at " << i;
        }
      }
    }
  }
  EXPECT_GT(splits, 150);
}

class RealTokenizersSlow : public RealTokenizers {};

TEST_F(RealTokenizersSlow, RoundTripEveryLineOfGsm8k) {
  COHORT_REQUIRE_DATA(dir);
  for (const char* name : {"tokenizers/gpt2", "tokenizers/llama2", "tokenizers/qwen2.5",
                           "tokenizers/phi-2", "tokenizers/minimind", "models/stories260K"}) {
    const Tokenizer& tokenizer = load(dir + "/" + name);
    int lines = 0;
    for (const char* part : {"train", "test"}) {
      std::ifstream file(dir + "/gsm8k/" + part + ".jsonl");
      for (std::string line; std::getline(file, line); ++lines) {
        const Ids ids = tokenizer.encode(line);
        ASSERT_EQ(tokenizer.decode(ids), line) << name;
        ASSERT_EQ(streamed(tokenizer, ids), line) << name;
      }
    }
    EXPECT_EQ(lines, 7473 + 1319);
  }
}

}  // namespace
}  // namespace cohort
