// Components of a tokenizer: normal forms, splitters, matching, merging, decoding.
#include <algorithm>
#include <map>

#include "core/rng.h"
#include "tests/support/test_util.h"
#include "text/regex.h"
#include "text/tokenizers/bpe.h"
#include "text/tokenizers/matcher.h"
#include "text/tokenizers/pipeline.h"
#include "text/tokenizers/splitters.h"
#include "text/unicode.h"
#include "text/utf8.h"

namespace cohort {
namespace {

// Random runs of characters that the patterns distinguish.
class RandomText {
 public:
  explicit RandomText(uint64_t seed) : stream_(rng_stream(kTestPurpose, seed)) {}
  uint32_t draw(uint32_t below) { return philox(1, stream_, index_++)[0] % below; }
  std::string next() {
    static const std::vector<std::string> kParts = {
        " ",  "  ",     "\n",     "\r\n",   "\t",     "a",  "Zz", "s",      "ſ",      "S",
        "'",  "'S",     "'re",    "'LL",    "é",      "你", "1",  "22",     "½",      "!",
        "-.", "\u3000", "\u00a0", "\u180e", "\u0301", "😀",  "_",  "\u0085", "\u0903", "\u20dd"};
    std::string text;
    for (uint32_t n = draw(12); n > 0; --n)
      text += kParts[draw(static_cast<uint32_t>(kParts.size()))];
    return text;
  }

 private:
  uint64_t stream_, index_ = 0;
};

TEST(Splitters, EqualTheirRegularExpressions) {
  for (const char* pattern : {kGpt2Pattern, kQwenPattern, kLlama3Pattern, kQwen35Pattern}) {
    const Splitter splitter = find_splitter(pattern);
    ASSERT_NE(splitter, nullptr);
    const Regex regex(pattern, Regex::Classes::kUnicode);
    RandomText random(1);
    for (int i = 0; i < 5000; ++i) {
      const std::string text = random.next();
      int64_t work = 1'000'000;
      std::vector<size_t> expected, ends;
      regex.find_all(text, work, [&](size_t, size_t end) { expected.push_back(end); });
      for (size_t at = 0; at < text.size();) ends.push_back(at = splitter(text, at));
      ASSERT_EQ(ends, expected) << excerpt(text);
    }
  }
  EXPECT_EQ(find_splitter("\\s+"), nullptr);
}

// The words that `tokenizers` 0.23.3 gives by transformers' pattern for Qwen3.5. In 100,000 random
// texts it differed only for characters that are newer than the tables here.
TEST(Splitters, InQwen35MarksBelongToWords) {
  for (const auto& [text, expected] :
       {std::pair{"हिन्दी में ९९ किताबें", "हिन्दी| में| |९|९| किताबें"},
        {"e\u0301te\u0301 'S 've", "e\u0301te\u0301| '|S| '|ve"},
        {"\u0301a \u0301  \u0301b", "\u0301a| \u0301| | \u0301b"},
        {"1\u0301 22!\u0301!!\u0301", "1|\u0301| |2|2|!\u0301|!!|\u0301"},
        {"\n\u0301 \t\u0903\r\n\n ก็ดี", "\n|\u0301| |\t\u0903|\r\n\n| ก็ดี"},
        {"ſ 'ſ\u20dd x\u200d\u0301", "ſ| '|ſ\u20dd| x|\u200d\u0301"},
        {"\u20dd\u20dd'\u0301s", "\u20dd\u20dd|'\u0301s"},
        {"  \n \u3000\u0301 ", "  \n| |\u3000\u0301| "}}) {
    const std::string_view all = text;
    std::vector<std::string> words;
    for (size_t at = 0, end = 0; at < all.size(); at = end) {
      end = find_splitter(kQwen35Pattern)(all, at);
      words.emplace_back(all.substr(at, end - at));
    }
    EXPECT_EQ(join(words, "|"), expected);
  }
}

TEST(RegexFindAll, StopsAtItsBudget) {
  const Regex regex("(a+)+$", Regex::Classes::kUnicode);
  int64_t work = 100'000;
  EXPECT_THROW_WITH(regex.find_all(std::string(100, 'a') + "b", work, [](size_t, size_t) {}),
                    InputError, "too much work");
}

TEST(RegexFindAll, WhiteSpaceIsUnicodes) {
  const Regex spaces(R"([\s]|x\S)", Regex::Classes::kUnicode);
  int found = 0;
  int64_t work = 100'000'000;
  for (char32_t code = 0; code < 0x3100; ++code)
    spaces.find_all(encode_utf8(code), work, [&](size_t, size_t) {
      ++found;
      EXPECT_TRUE(has_class(code, kWhiteSpace)) << describe_character(code);
    });
  EXPECT_EQ(found, 25);  // the number of White_Space characters
}

// Oniguruma, which the `tokenizers` library uses, finds the same.
TEST(RegexFindAll, ReadsPatternsAsOnigurumaDoes) {
  const auto found = [](const char* pattern, std::string_view text) {
    std::string out;
    int64_t work = 1'000'000;
    Regex(pattern, Regex::Classes::kUnicode).find_all(text, work, [&](size_t begin, size_t end) {
      out.append(text.substr(begin, end - begin)).append("|");
    });
    return out;
  };
  EXPECT_EQ(found(R"(\p{Han}+)", "中、文。x"), "中|文|");
  EXPECT_EQ(found(R"([\p{Hiragana}、]+)", "か。き、ー"), "か|き、|");
  EXPECT_EQ(found(R"([\P{Han}])", "中、"), "、|");
  EXPECT_EQ(found(R"(\p{^Han}|\p{Lu})", "中、A"), "、|A|");
  EXPECT_EQ(found(R"(\b.)", "か\u3099 x"), "か| |x|");
  EXPECT_EQ(found(R"(\B.)", "か\u3099 x"), "\u3099|");
  EXPECT_EQ(found(R"(\d{1,3}(?=(?:\d{3})*\b))", "12345ê"), "");
  EXPECT_EQ(found(R"(\p{N}{1,3}|\p{L}++|[}+]+)", "12345ab}+"), "123|45|ab|}+|");
  EXPECT_EQ(found(R"(\x{61}+|[]b]|\{2}|[\x{4e00}-\x{9fff}&])", "aa]{2}中&"), "aa|]|{2}|中|&|");
}

TEST(RegexFindAll, RefusesWhatPcreReadsOtherwise) {
  for (const char* pattern : {R"(\h)", R"([\h])", R"(\v)", R"(\pL)", R"([\pL])", R"(\Qa\E)",
                              R"([^\W\d])", R"([\x80-\xff])", R"(\xe9)", "[a-z&&[^b]]",
                              "[[:alpha:]]", "[[a]b]", "a{,2}", "\\p{N}{1,3}+", "(?m:.)", "(?im)."})
    EXPECT_THROW_WITH(Regex(pattern, Regex::Classes::kUnicode), InputError, "not supported: ");
}

TEST(NormalForms, DecomposeAndCompose) {
  EXPECT_EQ(to_normal_form("Å\u212b ﬁ", NormalForm::kNfc), "ÅÅ ﬁ");
  EXPECT_EQ(to_normal_form("Å\u212b ﬁ", NormalForm::kNfd), "A\u030aA\u030a ﬁ");
  EXPECT_EQ(to_normal_form("Å\u212b ﬁ", NormalForm::kNfkc), "ÅÅ fi");
  EXPECT_EQ(to_normal_form("q\u0307\u0323", NormalForm::kNfc), "q\u0323\u0307");
  EXPECT_EQ(to_normal_form("\u1112\u1161\u11ab", NormalForm::kNfc), "한");
  EXPECT_EQ(to_normal_form("\u1112\u1161\u11a7", NormalForm::kNfc), "하\u11a7");
  EXPECT_EQ(to_normal_form("\u0958", NormalForm::kNfc), "\u0915\u093c");  // never composed again
  EXPECT_EQ(to_normal_form("", NormalForm::kNfkd), "");
}

TEST(NormalForms, AMillionMarksAreNotQuadratic) {
  std::string text = "a";
  for (int i = 0; i < 200'000; ++i) text += i % 2 == 0 ? "\u0301" : "\u0323";
  EXPECT_EQ(to_normal_form(text, NormalForm::kNfd).size(), text.size());
}

TEST(LeftmostLongest, PrefersTheFirstThenTheLongest) {
  const LeftmostLongest matcher({"ab", "abcd", "bc", "", "cde"});
  const auto found = [&](const char* text) {
    std::string out;
    for (const Match& m : matcher.find_all(text)) out += str(m.text, "@", m.begin, "-", m.end, " ");
    return out;
  };
  EXPECT_EQ(found("abcde"), "1@0-4 ");
  EXPECT_EQ(found("abcxab"), "0@0-2 0@4-6 ");
  EXPECT_EQ(found("xbcde"), "2@1-3 ");
  EXPECT_EQ(found(""), "");
}

TEST(LeftmostLongest, HostileTextsTakeLinearTime) {
  const LeftmostLongest matcher({std::string(50'000, 'a') + "b", "c"});
  EXPECT_TRUE(matcher.find_all(std::string(1'000'000, 'a')).empty());
}

// A reference implementation of the merges.
std::vector<int32_t> merge_slowly(const std::map<std::pair<int, int>, Merge>& merges,
                                  std::vector<int32_t> ids) {
  while (true) {
    size_t best = ids.size();
    uint32_t rank = Merge::kNone;
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      const auto it = merges.find({ids[i], ids[i + 1]});
      if (it != merges.end() && it->second.rank < rank) best = i, rank = it->second.rank;
    }
    if (best == ids.size()) return ids;
    ids[best] = merges.at({ids[best], ids[best + 1]}).id;
    ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  }
}

TEST(Bpe, ShortAndLongWordsMergeByRank) {
  RandomText random(2);
  for (int round = 0; round < 300; ++round) {
    std::map<std::pair<int, int>, Merge> merges;
    PairMap<Merge> table(60);
    for (uint32_t rank = 0; rank < 60; ++rank) {
      const auto next = static_cast<int32_t>(4 + rank);
      const int32_t a = static_cast<int32_t>(random.draw(4 + rank)),
                    b = static_cast<int32_t>(random.draw(4 + rank));
      merges[{a, b}] = {rank, next};
      table.set(a, b, {rank, next});
    }
    for (const uint32_t size : {0u, 1u, 2u, 30u, 48u, 49u, 300u}) {
      std::vector<int32_t> ids{-7};  // the end of another word
      for (uint32_t i = 0; i < size; ++i) ids.push_back(static_cast<int32_t>(random.draw(4)));
      auto expected = merge_slowly(merges, {ids.begin() + 1, ids.end()});
      merge_all(table, ids, 1);
      ASSERT_EQ(std::vector<int32_t>(ids.begin() + 1, ids.end()), expected);
      ASSERT_EQ(ids[0], -7);
    }
  }
}

std::string words_of(const char* json, std::string_view text) {
  const PreTokenization made = make_pre_tokenizer(parse_json(json, "json"), WordText::kCharacters);
  std::string out;
  Work work(text.size());
  made.split({text, true}, work, [&](Piece piece) { out += std::string(piece.text) + "|"; });
  return out;
}

TEST(PreTokenizers, EveryBehaviorOfSplit) {
  const auto split = [](const char* behavior, const char* invert, const char* text) {
    return words_of(str(R"({"type":"Split","pattern":{"String":"-"},"behavior":")", behavior,
                        R"(","invert":)", invert, "}")
                        .c_str(),
                    text);
  };
  // The examples of the `tokenizers` documentation.
  EXPECT_EQ(split("Removed", "false", "the-final--countdown"), "the|final|countdown|");
  EXPECT_EQ(split("Isolated", "false", "the-final--countdown"), "the|-|final|-|-|countdown|");
  EXPECT_EQ(split("MergedWithPrevious", "false", "the-final--countdown"),
            "the-|final-|-|countdown|");
  EXPECT_EQ(split("MergedWithNext", "false", "the-final--countdown"), "the|-final|-|-countdown|");
  EXPECT_EQ(split("Contiguous", "false", "the-final--countdown"), "the|-|final|--|countdown|");
  EXPECT_EQ(split("Removed", "true", "the-final--"), "-|-|-|");
}

TEST(PreTokenizers, OthersSplitAsTheirNamesSay) {
  EXPECT_EQ(words_of(R"({"type":"Whitespace"})", "Hi, you_2  naïve!?"), "Hi|,|you_2|naïve|!?|");
  EXPECT_EQ(words_of(R"({"type":"WhitespaceSplit"})", "Hi, you  x"), "Hi,|you|x|");
  EXPECT_EQ(words_of(R"({"type":"BertPreTokenizer"})", "Hi, you$x"), "Hi|,|you|$|x|");
  EXPECT_EQ(words_of(R"({"type":"Digits","individual_digits":false})", "a12b"), "a|12|b|");
  EXPECT_EQ(words_of(R"({"type":"Digits","individual_digits":true})", "a12b"), "a|1|2|b|");
  EXPECT_EQ(words_of(R"({"type":"Metaspace","replacement":"▁","prepend_scheme":"always"})", "a  b"),
            "▁a|▁|▁b|");
  EXPECT_EQ(words_of(R"({"type":"ByteLevel","add_prefix_space":true})", "a é"), "Ġa|ĠÃ©|");
}

std::string normalized(const char* json, std::string text) {
  const auto normalizer = make_normalizer(parse_json(json, "json"));
  Work work(text.size());
  normalizer(text, work);
  return text;
}

TEST(Normalizers, DoWhatTheirNamesSay) {
  EXPECT_EQ(normalized(R"({"type":"Lowercase"})", "ÀİSẞ"), "ài\u0307sß");
  EXPECT_EQ(normalized(R"({"type":"Sequence","normalizers":[{"type":"NFD"},
                          {"type":"StripAccents"}]})",
                       "naïve é"),
            "naive e");
  EXPECT_EQ(normalized(R"({"type":"BertNormalizer"})", "\tÉ你\u200bx\x01"), " e 你 x");
  // Cn stays; Cc, Cf, Co and U+FFFD go.
  EXPECT_EQ(normalized(R"({"type":"BertNormalizer"})", "a\u0378b\U000e0fffc\ue000d\u00ade\ufffdf"),
            "a\u0378b\U000e0fffcdef");
  EXPECT_EQ(normalized(R"({"type":"Replace","pattern":{"Regex":"\\s+"},"content":"_"})", "a \n b"),
            "a_b");
  EXPECT_EQ(normalized(R"({"type":"Prepend","prepend":"x"})", ""), "");
  EXPECT_EQ(normalized(R"({"type":"Strip","strip_left":true,"strip_right":false})", "  a "), "a ");
  EXPECT_THROW_WITH(make_normalizer(Json().set("type", "Precompiled2")), InputError,
                    "unknown normalizer 'Precompiled2'; known: Sequence");
}

TEST(Normalizers, MultipliedTextIsRefused) {
  Json steps = Json::Array{};
  for (int i = 0; i < 40; ++i)
    steps.push_back(Json()
                        .set("type", "Replace")
                        .set("pattern", Json().set("String", "a"))
                        .set("content", "aa"));
  const auto normalizer =
      make_normalizer(Json().set("type", "Sequence").set("normalizers", std::move(steps)));
  std::string text = "a";
  Work work(1);
  EXPECT_THROW_WITH(normalizer(text, work), InputError, "too much text");
}

std::string decoded(const char* json, const std::vector<const char*>& tokens) {
  Decoder decoder(parse_json(json, "json"));
  Work work(100);
  std::string text;
  for (const char* token : tokens) text += decoder.push(token, work);
  return text + decoder.peek(work);
}

TEST(Decoders, DoWhatTheirNamesSay) {
  EXPECT_EQ(decoded("null", {"a", "b"}), "a b");
  EXPECT_EQ(decoded(R"({"type":"ByteFallback"})", {"<0xE2>", "<0x82>", "<0xAC>", "x", "<0xE2>"}),
            "€x\ufffd");
  EXPECT_EQ(decoded(R"({"type":"ByteFallback"})", {"<0x61>", "<0xFF>"}), "\ufffd\ufffd");
  EXPECT_EQ(decoded(R"({"type":"ByteLevel"})", {"Ġa", "Ã", "©", "â"}), " aé\ufffd");
  EXPECT_EQ(decoded(R"({"type":"ByteLevel"})", {"<|你|>"}), "<|你|>");
  EXPECT_EQ(
      decoded(R"({"type":"Metaspace","replacement":"▁","prepend_scheme":"always"})", {"▁a", "▁b"}),
      "a b");
  EXPECT_EQ(decoded(R"({"type":"WordPiece","prefix":"##","cleanup":true})",
                    {"do", "##ing", "it", "!", "do", "not"}),
            "doing it! do not");
  EXPECT_EQ(decoded(R"({"type":"BPEDecoder","suffix":"</w>"})", {"a</w>", "b", "c</w>"}), "a bc");
  // Fused tokens form one, of which only the first space is stripped.
  EXPECT_EQ(decoded(R"({"type":"Sequence","decoders":[{"type":"Fuse"},
                        {"type":"Strip","content":" ","start":1,"stop":1}]})",
                    {" a", " ", "b ", " ", " "}),
            "a b  ");
}

// The text of tokens after others whose text is discarded.
std::string decoded_after(const char* json, const std::vector<const char*>& before,
                          const std::vector<const char*>& tokens) {
  Decoder decoder(parse_json(json, "json"));
  Work work(100);
  for (const char* token : before) decoder.push(token, work);
  decoder.discard(work);
  std::string text;
  for (const char* token : tokens) text += decoder.push(token, work);
  return text + decoder.peek(work);
}

TEST(Decoders, DiscardOmitsHeldBackText) {
  const char* suffix = R"({"type":"BPEDecoder","suffix":"</w>"})";
  EXPECT_EQ(decoded_after(suffix, {"a</w>"}, {"b</w>", "c"}), " b c");
  EXPECT_EQ(decoded_after(suffix, {"a"}, {"b</w>"}), "b");
  EXPECT_EQ(decoded_after(suffix, {"a</w>"}, {}), "");
  const char* strip = R"({"type":"Sequence","decoders":[{"type":"Fuse"},
                          {"type":"Strip","content":" ","start":1,"stop":2}]})";
  EXPECT_EQ(decoded_after(strip, {"a", " "}, {"b", " "}), "b");
  // A step on the whole text returns it again, with the new text at its end.
  const char* whole = R"({"type":"Sequence","decoders":[{"type":"ByteLevel"},
                          {"type":"Replace","pattern":{"String":"ab"},"content":"x"}]})";
  EXPECT_EQ(decoded_after(whole, {"a", "b"}, {"c", "ab"}), "cx");
  EXPECT_EQ(decoded_after(whole, {"q"}, {}), "");
}

}  // namespace
}  // namespace cohort
