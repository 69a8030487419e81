// Byte and character tokenizers: round trips, vocabulary, and errors for text they cannot encode.
#include "text/tokenizer.h"

#include <algorithm>

#include "tests/support/test_util.h"
#include "text/tokenizers/hugging_face.h"
#include "text/utf8.h"

namespace cohort {
namespace {

using Ids = std::vector<int32_t>;

TEST(ByteTokenizer, RoundTripsEveryByte) {
  std::string text;
  for (int i = 0; i < 256; ++i) text += static_cast<char>(i);
  const auto tokenizer = make_byte_tokenizer();
  const Ids ids = tokenizer->encode(text);
  ASSERT_EQ(ids.size(), 256u);
  for (int i = 0; i < 256; ++i) EXPECT_EQ(ids[static_cast<size_t>(i)], i);
  EXPECT_EQ(tokenizer->decode(ids), text);
  EXPECT_EQ(tokenizer->vocab_size(), 257);
  EXPECT_EQ(tokenizer->eos_id(), 256);
}

TEST(CharTokenizer, NumbersCharactersInCodePointOrder) {
  const auto tokenizer = make_char_tokenizer("b€a😀b\né");
  EXPECT_EQ(tokenizer->vocab_size(), 7);
  EXPECT_EQ(tokenizer->eos_id(), 6);
  EXPECT_EQ(tokenizer->encode("\nabé€😀"), (Ids{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(tokenizer->decode(Ids{5, 6, 4, 0}), "😀€\n");
  EXPECT_TRUE(tokenizer->encode("").empty());
}

TEST(CharTokenizer, NamesTheCharacterItLacks) {
  const auto tokenizer = make_char_tokenizer("aé");
  EXPECT_THROW_WITH(tokenizer->encode("éaxa"), InputError, "'x' (U+0078) at byte 3 has no token");
  EXPECT_THROW_WITH(tokenizer->encode("a\n"), InputError, "U+000A at byte 1");
  EXPECT_THROW_WITH(tokenizer->encode("a😀"), InputError, "'😀' (U+1F600) at byte 1");
  EXPECT_THROW_WITH(tokenizer->encode("a\xc3"), InputError, "byte 1 is not part of UTF-8");
}

TEST(CharTokenizer, RefusesTextThatIsEmptyOrNotUtf8) {
  EXPECT_THROW_WITH(make_char_tokenizer(""), InputError, "empty");
  EXPECT_THROW_WITH(make_char_tokenizer("ab\xff"), InputError, "byte 2");
}

TEST(Tokenizer, IdsWithoutATokenGiveNoText) {
  for (const auto& tokenizer : {make_byte_tokenizer(), make_char_tokenizer("abc")}) {
    const auto past = static_cast<int32_t>(tokenizer->vocab_size());
    const Ids a = tokenizer->encode("a");
    EXPECT_EQ(tokenizer->decode(Ids{tokenizer->eos_id(), -1, a[0], past}), "a");
  }
}

TEST(Tokenizer, FilesMakeItAgain) {
  for (const auto& tokenizer : {make_byte_tokenizer(), make_char_tokenizer("model \"é")}) {
    const auto back = make_tokenizer(tokenizer->files(), "folder");
    EXPECT_EQ(back->files(), tokenizer->files());
  }
}

TEST(Tokenizer, StreamHoldsBackUnfinishedCharacters) {
  const auto tokenizer = make_byte_tokenizer();
  StreamDecoder stream(*tokenizer);
  EXPECT_EQ(stream.push(0xf0), "");
  EXPECT_EQ(stream.push(0x9f), "");
  EXPECT_EQ(stream.push(0x98), "");
  EXPECT_EQ(stream.push(0x80), "\xf0\x9f\x98\x80");
  EXPECT_EQ(stream.push(0xc3), "");
  EXPECT_EQ(stream.push('a'),
            "\xc3"
            "a");
  EXPECT_EQ(stream.push(0xe2), "");
  EXPECT_EQ(stream.peek(), "\xe2");
}

TEST(Tokenizer, SurvivesItsFiles) {
  const std::string text("q\0\"\\\x7f é😀", 12);
  for (const auto& tokenizer : {make_byte_tokenizer(), make_char_tokenizer(text)}) {
    const auto back = make_tokenizer(tokenizer->files(), "folder");
    EXPECT_EQ(back->vocab_size(), tokenizer->vocab_size());
    EXPECT_EQ(back->eos_id(), tokenizer->eos_id());
    EXPECT_EQ(back->encode(text), tokenizer->encode(text));
    EXPECT_EQ(back->decode(back->encode(text)), text);
  }
}

TEST(Tokenizer, OlderFilesAreRead) {
  const auto read = [](const char* json) {
    return make_tokenizer({{"tokenizer.json", json}}, "folder")->files();
  };
  EXPECT_EQ(read(R"({"type": "byte"})"), make_byte_tokenizer()->files());
  EXPECT_EQ(read(R"({"type": "char", "characters": "\n\"aé😀"})"),
            make_char_tokenizer("é\n😀a\"")->files());
}

// The reader of Hugging Face's files has the library's ids (tokenizer_files_test.cpp).
TEST(Tokenizer, FilesAreThoseOfHuggingFace) {
  const std::string text("q\0\"\\\x7f é  €\r\n\t\u2028e\u0301😀", 27);
  for (const auto& tokenizer : {make_byte_tokenizer(), make_char_tokenizer(text)}) {
    const auto other = make_hugging_face_tokenizer(tokenizer->files(), "folder");
    const Ids ids = tokenizer->encode(text);
    EXPECT_EQ(other->encode(text, SpecialTokens::kAdd), ids);
    EXPECT_EQ(other->decode(ids), text);
    EXPECT_EQ(other->vocab_size(), tokenizer->vocab_size());
    EXPECT_EQ(other->stop_ids(), Ids{tokenizer->eos_id()});
    EXPECT_EQ(other->decode(Ids{tokenizer->eos_id()}, SpecialText::kShow), "<|endoftext|>");
  }
  const auto other = make_hugging_face_tokenizer(make_char_tokenizer("ab")->files(), "folder");
  EXPECT_THROW_WITH(other->encode("axb"), InputError, "'x'");
}

TEST(Tokenizer, FilesThatAreReadAgainEncodeAnyBytes) {
  const std::string text = "<|endoftext|>\xff\xc3";
  const auto back = make_tokenizer(make_byte_tokenizer()->files(), "folder");
  EXPECT_EQ(back->decode(back->encode(text)), text);
  EXPECT_EQ(back->encode(text).size(), text.size());
  const auto characters = make_tokenizer(make_char_tokenizer("ab")->files(), "folder");
  EXPECT_THROW_WITH(characters->encode("abc"), InputError, "'c' (U+0063) at byte 2 has no token");
}

// transformers adds the settings of its last call.
TEST(Tokenizer, FilesThatTransformersHasSavedAreRead) {
  for (const auto& tokenizer : {make_byte_tokenizer(), make_char_tokenizer("ab")}) {
    Json json = parse_json(tokenizer->files()[0].second, "t");
    json.set("truncation", Json().set("max_length", 8)).set("padding", Json().set("pad_id", 0));
    const auto back = make_tokenizer({{"tokenizer.json", json.dump()}}, "t");
    EXPECT_EQ(back->files(), tokenizer->files());
  }
}

TEST(Tokenizer, FilesWithOtherIdsKeepThem) {
  Json json = parse_json(make_char_tokenizer("ab")->files()[0].second, "t");
  json["model"].set("vocab", Json().set("b", 0).set("a", 1));
  EXPECT_EQ(make_tokenizer({{"tokenizer.json", json.dump()}}, "t")->encode("ab"), (Ids{1, 0}));
  json["model"].set("vocab", Json().set("a", 0).set("ab", 1));
  EXPECT_EQ(make_tokenizer({{"tokenizer.json", json.dump()}}, "t")->encode("a"), Ids{0});
  for (const char* bad : {R"({"model": 3})", R"({"model": {"type": "WordLevel", "vocab": {}}})",
                          R"({"model": {"type": "WordLevel", "vocab": [1]}})",
                          R"({"model": {"type": "WordLevel", "vocab": {"a": -1}}})",
                          R"(["model", "WordLevel"])", R"({"model" "WordLevel")"})
    EXPECT_THROW_WITH(make_tokenizer({{"tokenizer.json", bad}}, "t")->eos_id(), InputError, "t");
}

TEST(Tokenizer, DamagedJsonIsAnInputError) {
  const auto read = [](const std::string& text) {
    return make_tokenizer({{"tokenizer.json", text}}, "t");
  };
  for (const char* text :
       {"{}", "[]", "3", "null", R"({"type":1})", R"({"type":"char"})",
        R"({"type":"char","characters":""})", R"({"type":"char","characters":[1]})",
        R"({"type":"char","characters":"ba"})", R"({"type":"char","characters":"aa"})"})
    EXPECT_THROW_WITH(read(text), InputError, "t/tokenizer.json: damaged tokenizer");
  EXPECT_THROW_WITH(read(R"({"type":"bpe"})"), InputError,
                    "unknown tokenizer type 'bpe'; known: byte, char");
  EXPECT_THROW_WITH(read("{\"type\":\"char\",\"characters\":\"a\xff\"}"), InputError, "UTF-8");
}

TEST(CharTokenizer, TinyShakespeareHas65Characters) {
  COHORT_REQUIRE_DATA(dir);
  const std::string text = test::read_file(dir + "/tinyshakespeare/input.txt");
  const auto tokenizer = make_char_tokenizer(text);
  EXPECT_EQ(tokenizer->vocab_size(), 65 + 1);
  const Ids ids = tokenizer->encode(text);
  EXPECT_EQ(ids.size(), text.size());
  EXPECT_TRUE(tokenizer->decode(ids) == text);
}

TEST(Utf8, DecodesEveryScalarValueItEncodes) {
  for (char32_t code = 0; code <= 0x10ffff; ++code) {
    if (code == 0xd800) code = 0xe000;
    const std::string text = encode_utf8(code);
    const Utf8Char c = decode_utf8(text, 0);
    ASSERT_EQ(c.size, text.size());
    ASSERT_EQ(c.code, code);
  }
  EXPECT_THROW(encode_utf8(0xd800), Error);
  EXPECT_THROW(encode_utf8(0x110000), Error);
}

TEST(Utf8, RefusesIllFormedSequences) {
  // Stray continuation, overlong forms, surrogate, beyond U+10FFFF, truncated, invalid lead bytes.
  for (const char* text :
       {"\x80", "\xc0\x80", "\xc1\xbf", "\xe0\x80\xaf", "\xf0\x80\x80\xaf", "\xed\xa0\x80",
        "\xf4\x90\x80\x80", "\xe2\x82", "\xf5\x80\x80\x80", "\xc3(", "\xff"})
    EXPECT_EQ(decode_utf8(text, 0).size, 0u);
}

TEST(Utf8, RepairReplacesEachMaximalSubpart) {
  // The examples of the Unicode standard, section 3.9, table 3-8 and following.
  const std::string r = "\xef\xbf\xbd";
  EXPECT_EQ(repair_utf8("\xc0\xaf\xe0\x80\xbf\xf0\x81\x82"
                        "A"),
            r + r + r + r + r + r + r + r + "A");
  EXPECT_EQ(repair_utf8("\xed\xa0\x80\xed\xbf\xbf\xed\xaf"
                        "A"),
            r + r + r + r + r + r + r + r + "A");
  EXPECT_EQ(repair_utf8("\xe1\x80\xe2\xf0\x91\x92\xf1\xbf"
                        "A"),
            r + r + r + r + "A");
  EXPECT_EQ(repair_utf8("\xe4\xbd\xa0\xe4\xbd"), "\xe4\xbd\xa0" + r);
}

TEST(Utf8, UnfinishedCountsOnlyWhatCanBeFinished) {
  EXPECT_EQ(unfinished_utf8("a"), 0u);
  EXPECT_EQ(unfinished_utf8("a\xc3"), 1u);
  EXPECT_EQ(unfinished_utf8("\xf0\x9f\x98"), 3u);
  EXPECT_EQ(unfinished_utf8("\xf0\x9f\x98\x80"), 0u);
  EXPECT_EQ(unfinished_utf8("\xe0\x80"), 0u);  // overlong
  EXPECT_EQ(unfinished_utf8("\xff"), 0u);
}

TEST(Utf8, StripsCharactersFromTheSidesAsked) {
  const auto is_stripped = [](char32_t code) { return code == ' ' || code == 0x3000; };
  const std::string text = " \u3000é \u3000";
  EXPECT_EQ(strip_if(text, Side::kLeft, is_stripped), "é \u3000");
  EXPECT_EQ(strip_if(text, Side::kRight, is_stripped), " \u3000é");
  EXPECT_EQ(strip_if(text, Side::kBoth, is_stripped), "é");
  EXPECT_EQ(strip_if(" \u3000 ", Side::kRight, is_stripped), "");
}

TEST(Utf8, ReplacesOccurrencesFromLeftToRight) {
  EXPECT_EQ(replaced("aaab", "aa", "x"), "xab");
  EXPECT_EQ(replaced("aab", "a", ""), "b");
}

TEST(Excerpt, IsOneLineWithoutTheMiddle) {
  EXPECT_EQ(excerpt("a\nb"), "'a\\nb'");
  EXPECT_EQ(excerpt(std::string(70, 'a')), "'" + std::string(70, 'a') + "'");
  EXPECT_EQ(excerpt(std::string(40, 'a') + "no" + std::string(40, 'c') + "\n"),
            "'" + std::string(40, 'a') + "..." + std::string(19, 'c') + "\\n'");
  EXPECT_EQ(excerpt("a\x01\xff\n\xC3\xA9"), "'a??\\n\xC3\xA9'");
}

}  // namespace
}  // namespace cohort
