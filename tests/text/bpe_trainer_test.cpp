// Training a byte-level BPE: the merges learned, and that the files read back.
#include "text/tokenizers/bpe_trainer.h"

#include <algorithm>

#include "tests/support/test_util.h"

namespace cohort {
namespace {

std::vector<std::string> merges_of(const NamedFiles& files) {
  const Json json = parse_json(files.at(0).second, "tokenizer.json");
  std::vector<std::string> merges;
  for (const Json& merge : json.at("model").at("merges").as_array())
    merges.push_back(merge.as_array()[0].as_string() + " " + merge.as_array()[1].as_string());
  return merges;
}

NamedFiles train(std::string_view text, BpeTrainerOptions options = {}) {
  BpeTrainer trainer(std::move(options));
  trainer.add_text(text);
  return trainer.train();
}

TEST(BpeTrainer, MergesTheMostFrequentPairsFirst) {
  // "low" 5 times, "lower" twice, "newest" 6 times, "widest" 3 times: es and st 9 times, of which
  // es comes first by its ids; then es+t; then l+o and o+w 7 times.
  std::string text;
  for (const auto& [word, n] : {std::pair("low", 5), {"lower", 2}, {"newest", 6}, {"widest", 3}})
    for (int i = 0; i < n; ++i) text += std::string(word) + "\n";
  const auto merges = merges_of(train(text, {.vocab_size = 256 + 1 + 4}));
  EXPECT_EQ(merges, (std::vector<std::string>{"e s", "es t", "l o", "lo w"}));
}

TEST(BpeTrainer, EndsWithoutARepeatedPair) {
  EXPECT_EQ(merges_of(train("abc abd", {.vocab_size = 1000})), std::vector<std::string>{"a b"});
  EXPECT_TRUE(merges_of(train("", {.vocab_size = 1000})).empty());
}

TEST(BpeTrainer, FilesMakeATokenizerThatRoundTrips) {
  std::string text;
  for (int i = 0; i < 50; ++i) text += "the cat's hat, the naïve 你好 123 \n\n aaaaaa<s>";
  const NamedFiles files = train(text, {.vocab_size = 280, .special = {"<|endoftext|>", "<s>"}});
  const auto tokenizer = make_tokenizer(files, "trained");
  EXPECT_EQ(tokenizer->decode(tokenizer->encode(text), SpecialText::kShow), text);
  EXPECT_LT(tokenizer->encode(text).size(), text.size() / 2);
  EXPECT_EQ(tokenizer->vocab_size(), 280);
  EXPECT_EQ(tokenizer->decode(std::vector{tokenizer->eos_id()}, SpecialText::kShow),
            "<|endoftext|>");
  EXPECT_EQ(tokenizer->files(), files);
  // Merges are learned from the text between special tokens only.
  for (const std::string& merge : merges_of(files)) EXPECT_EQ(merge.find('<'), merge.npos);
}

TEST(BpeTrainer, DependsOnTheWordsOnly) {
  BpeTrainer one({.vocab_size = 300}), two({.vocab_size = 300});
  one.add_text("hello world\nhello there\n");
  one.add_text("other words\n");
  two.add_text("other words\n");
  two.add_text("hello world\n");
  two.add_text("hello there\n");
  EXPECT_EQ(one.train(), two.train());
}

TEST(BpeTrainer, RefusesWhatCannotBeTrained) {
  EXPECT_THROW_WITH(BpeTrainer({.vocab_size = 256}), InputError, "the vocabulary must have 257");
  EXPECT_THROW_WITH(BpeTrainer({.special = {"a", "a"}}), InputError, "given twice");
  EXPECT_THROW_WITH(BpeTrainer({.special = {""}}), InputError, "not empty");
  EXPECT_THROW_WITH(BpeTrainer({.special = {}}), InputError, "needed");
  EXPECT_THROW_WITH(train("ab\xff"), InputError, "byte 2 is not part of UTF-8");
}

TEST(BpeTrainer, OneLongWordIsNotQuadratic) {
  const auto merges = merges_of(train(std::string(1'000'000, 'a'), {.vocab_size = 400}));
  ASSERT_GE(merges.size(), 2u);
  EXPECT_EQ(merges[0], "a a");
  EXPECT_EQ(merges[1], "aa aa");
}

}  // namespace
}  // namespace cohort
