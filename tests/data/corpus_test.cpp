// Text files: the held-out split, and the boundaries at which pieces are split.
#include "data/corpus.h"

#include <filesystem>

#include "core/rng.h"
#include "tests/support/test_util.h"
#include "text/tokenizers/bpe_trainer.h"
#include "text/utf8.h"

namespace cohort {
namespace {

std::string text_of(const std::vector<TextSpan>& spans) {
  std::string text;
  for (const TextSpan& span : spans) {
    EXPECT_LT(span.begin, span.end);
    text += InputFile(span.file).read(span.begin, span.end) + "|";
  }
  return text;
}

TEST(TextCorpus, HoldsOutTheEnd) {
  const test::TempDir dir;
  test::write_file(dir.path("text"), "0123456789");
  const TextCorpus corpus({dir.path("text")}, 0.25);
  EXPECT_EQ(text_of(corpus.train()), "0123456|");  // floor(7.5) bytes
  EXPECT_EQ(text_of(corpus.held_out()), "789|");
  EXPECT_FALSE(corpus.has_document_ends());
  const TextCorpus all({dir.path("text")}, 0);
  EXPECT_EQ(text_of(all.train()), "0123456789|");
  EXPECT_EQ(text_of(all.held_out()), "");
  const TextCorpus none({dir.path("text")}, 1);
  EXPECT_EQ(text_of(none.train()), "");
  EXPECT_EQ(text_of(none.held_out()), "0123456789|");
}

TEST(TextCorpus, NeverSplitsACharacter) {
  const test::TempDir dir;
  const std::string text = "aé€😀aé€😀";
  test::write_file(dir.path("text"), text);
  for (int percent = 20; percent <= 75; ++percent) {
    const TextCorpus corpus({dir.path("text")}, percent / 100.0);
    const std::string held_out = text_of(corpus.held_out());
    EXPECT_EQ(text_of(corpus.train()).size() + held_out.size(), text.size() + 2);
    EXPECT_NE(decode_utf8(held_out, 0).size, 0u) << percent;
  }
}

TEST(TextCorpus, TakesFoldersPatternsAndLines) {
  namespace fs = std::filesystem;
  const test::TempDir dir;
  fs::create_directories(dir.path("books/more/.git"));
  test::write_file(dir.path("books/b.txt"), "two words");
  test::write_file(dir.path("books/more/c.txt"), "");
  test::write_file(dir.path("books/more/.git/x"), "hidden");
  test::write_file(dir.path("books/.hidden"), "hidden");
  const std::string one = "{\"text\": \"one\"}\n", line = "{\"text\": \"line\\n\"}\n";
  test::write_file(dir.path("books/a.jsonl"), one + line);
  const auto of = [&](const char* path, double held_out) {
    return TextCorpus(text_files(dir.path(path)), held_out);
  };
  EXPECT_EQ(text_of(of("books", 0).train()), one + line + "|two words|");
  EXPECT_TRUE(of("books", 0).has_document_ends());
  EXPECT_EQ(text_of(of("books", 0.1).train()), one + line + "|two |");  // 38 of 43 bytes
  EXPECT_EQ(text_of(of("books", 0.1).held_out()), "words|");
  // A line is not split.
  EXPECT_EQ(text_of(of("books", 0.7).train()), one + "|");  // 12 bytes, and the rest of the line
  EXPECT_EQ(text_of(of("books", 0.7).held_out()), line + "|two words|");
  EXPECT_EQ(of("books", 1).held_out().size(), 2u);
  EXPECT_EQ(text_of(of("books/*.txt", 0).train()), "two words|");
  EXPECT_FALSE(of("books/*.txt", 0).has_document_ends());
  EXPECT_TRUE(of("books/a.jsonl", 0).has_document_ends());
  EXPECT_THROW_WITH(text_files(dir.path("*.md")), InputError, "no file matches this pattern");
  EXPECT_THROW_WITH(of("books/more", 0), InputError, "c.txt: is empty");
  fs::create_directory(dir.path("none"));
  EXPECT_THROW_WITH(of("none", 0), InputError, "there is no file in this folder");
}

TEST(TextCorpus, ErrorsNameTheFileAndTheNextStep) {
  const test::TempDir dir;
  EXPECT_THROW_WITH(TextCorpus({dir.path("none")}, 0.1), InputError,
                    "none: cannot be opened: No such file or directory; hint: ");
  EXPECT_THROW_WITH(TextCorpus({dir.path()}, 0.1), InputError, "is a folder; hint: ");
  test::write_file(dir.path("empty"), "");
  EXPECT_THROW_WITH(TextCorpus({dir.path("empty")}, 0.1), InputError, "empty: is empty; hint: ");
  test::write_file(dir.path("short"), "a");
  EXPECT_THROW_WITH(TextCorpus({dir.path("short")}, 0.1), InputError, "too few to hold out");
  test::write_file(dir.path("one"), "é");
  EXPECT_THROW_WITH(TextCorpus({dir.path("one")}, 0.4), InputError, "too few to hold out");
}

class Pieces : public testing::Test {
 protected:
  std::vector<int32_t> tokens(const std::vector<std::string>& files, const Tokenizer& tokenizer,
                              std::optional<int32_t> end = std::nullopt) {
    const TextPieces pieces(TextCorpus(files, 0).train());
    pieces_ = pieces.size();
    std::vector<int32_t> out;
    max_piece_tokens_ = 0;
    // In two calls: no boundary depends on which pieces are requested together.
    for (const auto& [first, last] : {std::pair(int64_t{0}, pieces_ / 2), {pieces_ / 2, pieces_}})
      for (const auto& part : pieces.encode(first, last, tokenizer, end)) {
        out.insert(out.end(), part.begin(), part.end());
        max_piece_tokens_ = std::max(max_piece_tokens_, part.size());
      }
    return out;
  }
  static std::unique_ptr<Tokenizer> bpe(const std::string& text) {
    BpeTrainer trainer({.vocab_size = 400});
    trainer.add_text(text);
    return make_tokenizer(trainer.train(), "trained");
  }
  // Words, numbers and punctuation between all kinds of white space.
  static std::string random_text(size_t size, uint64_t seed, const std::vector<const char*>& gaps) {
    const char* words[] = {"the", "cat", "2026", "don't", "café", "日本", "x=y+1;", "...", "a"};
    Rng rng(seed, 1);
    std::string text;
    while (text.size() < size) {
      text += words[rng.below(9)];
      text += gaps[static_cast<size_t>(rng.below(static_cast<int64_t>(gaps.size())))];
    }
    return text;
  }
  test::TempDir dir_;
  int64_t pieces_ = 0;
  size_t max_piece_tokens_ = 0;
};

TEST_F(Pieces, HaveTheTokensOfTheWholeText) {
  const std::vector<const char*> gaps[] = {{" ", " ", "\n", "\n\n", "  ", "\n  ", "\t", " \n"},
                                           {"\r\n", " ", "\r\n\r\n"},
                                           {"  ", " \n ", "\n\n"},  // never a single one
                                           {""}};                   // no white space at all
  uint64_t seed = 0;
  for (const auto& each : gaps) {
    const std::string text = random_text(1'500'000, ++seed, each);
    test::write_file(dir_.path("text"), text);
    const auto tokenizer = bpe(text.substr(0, next_utf8_boundary(text, 100'000)));
    EXPECT_EQ(tokens({dir_.path("text")}, *tokenizer), tokenizer->encode(text)) << seed;
    EXPECT_GE(pieces_, 5);
    EXPECT_LT(max_piece_tokens_, text.size() / 3) << seed;  // it has been split
    const auto characters = make_char_tokenizer(text);
    EXPECT_EQ(tokens({dir_.path("text")}, *characters), characters->encode(text));
  }
}

TEST_F(Pieces, AreOneWhereEverySplitChangesTokens) {
  // Adds a token at the start of every text.
  class Starts final : public Tokenizer {
   public:
    std::vector<int32_t> encode(std::string_view text, SpecialTokens) const override {
      std::vector<int32_t> out = {256};
      for (const char c : text) out.push_back(static_cast<unsigned char>(c));
      return out;
    }
    std::string decode(std::span<const int32_t>, SpecialText) const override { return ""; }
    std::unique_ptr<DecodeStream> decode_stream(SpecialText) const override { return nullptr; }
    int64_t vocab_size() const override { return 257; }
    int32_t eos_id() const override { return 256; }
    NamedFiles files() const override { return {}; }
  };
  const std::string text = random_text(900'000, 5, {" ", "\n"});
  test::write_file(dir_.path("text"), text);
  EXPECT_EQ(tokens({dir_.path("text")}, Starts()), Starts().encode(text, SpecialTokens::kNone));
}

TEST_F(Pieces, EndWhereDocumentsDo) {
  const auto tokenizer = make_byte_tokenizer();
  const int32_t end = tokenizer->eos_id();
  std::vector<int32_t> expected;
  std::string lines;
  Rng rng(3, 1);
  for (int i = 0; i < 300; ++i) {
    const std::string text = random_text(static_cast<size_t>(rng.below(20'000)), 10u + i, {" "});
    lines += "{\"text\": " + Json(text).dump() + "}" + (i % 7 == 0 ? "\r\n\n" : "\n");
    const auto ids = tokenizer->encode(text);
    expected.insert(expected.end(), ids.begin(), ids.end());
    if (!text.empty()) expected.push_back(end);
  }
  const std::string huge(700'000, 'x');  // a line longer than a piece
  lines += "{\"text\": \"" + huge + "\"}";
  expected.insert(expected.end(), huge.size(), 'x');
  expected.push_back(end);
  test::write_file(dir_.path("a.jsonl"), "\xEF\xBB\xBF" + lines);
  test::write_file(dir_.path("b.txt"), "bye");
  for (const int32_t id : {int32_t{'b'}, int32_t{'y'}, int32_t{'e'}, end}) expected.push_back(id);
  EXPECT_EQ(tokens({dir_.path("a.jsonl"), dir_.path("b.txt")}, *tokenizer, end), expected);
  EXPECT_GT(pieces_, 10);
}

TEST_F(Pieces, ErrorsNameFileAndLocation) {
  const auto digits = make_char_tokenizer("0123456789\n");
  std::string text;
  while (text.size() < 600'000) text += std::to_string(text.size()) + "\n";
  test::write_file(dir_.path("digits"), text + "x");
  EXPECT_THROW_WITH(tokens({dir_.path("digits")}, *digits), InputError,
                    dir_.path("digits") + ": from byte 52");
  EXPECT_THROW_WITH(tokens({dir_.path("digits")}, *digits), InputError, "the character 'x'");
  std::string lines;
  for (int i = 0; i < 50'000; ++i) lines += "{\"text\": \"1\"}\n";
  const auto expect_error = [&](const std::string& line, const std::string& message) {
    test::write_file(dir_.path("a.jsonl"), lines + line + "\n" + lines);
    EXPECT_THROW_WITH(tokens({dir_.path("a.jsonl")}, *digits), InputError,
                      dir_.path("a.jsonl") + ":50001: " + message);
  };
  expect_error("{\"text\": 3}", "expected an object with a text as the field 'text'");
  expect_error("[]", "expected an object with a text");
  expect_error("{\"text\": ", "not valid JSON");
  expect_error("{\"text\": \"a\"}", "the character 'a'");
  test::write_file(dir_.path("bad"), "caf\xe9 caf\xe9");
  EXPECT_THROW_WITH(TextPieces(TextCorpus({dir_.path("bad")}, 0).train()).characters(), InputError,
                    "bad: byte 3 is not part of UTF-8 text; hint: ");
}

TEST_F(Pieces, KnowEveryCharacter) {
  const std::string text = random_text(700'000, 8, {" ", "\n"}) + "€";
  test::write_file(dir_.path("text"), text);
  test::write_file(dir_.path("a.jsonl"), "{\"text\": \"\\u00dF\"}\n");
  const TextPieces pieces(TextCorpus({dir_.path("text"), dir_.path("a.jsonl")}, 0).train());
  EXPECT_EQ(make_char_tokenizer(pieces.characters())->files(),
            make_char_tokenizer(text + "ß")->files());
}

}  // namespace
}  // namespace cohort
