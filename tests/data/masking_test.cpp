// Masked windows: words together, frequencies, addressed draws, tokens that stay.
#include "data/masking.h"

#include <cmath>
#include <map>
#include <set>

#include "tests/support/test_util.h"
#include "text/tokenizers/bpe_trainer.h"

namespace cohort {
namespace {

using Window = std::vector<int32_t>;

constexpr int32_t kCls = 2, kSep = 3, kMaskId = 4, kFirstWord = 5;

// BERT's with the words w0 to w99 (ids 5 to 104), each continued by ##x (105) or ##y (106).
std::unique_ptr<Tokenizer> word_tokenizer() {
  std::string vocabulary = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n";
  for (int i = 0; i < 100; ++i) vocabulary += str("w", i, "\n");
  return make_tokenizer({{"vocab.txt", vocabulary + "##x\n##y\n"}}, "folder");
}

// [CLS], `words` words of one to three tokens, [SEP].
Window make_window(int words) {
  Window out{kCls};
  for (int i = 0; i < words; ++i) {
    out.push_back(kFirstWord + i % 100);
    for (int k = 0; k < i % 3; ++k) out.push_back(105 + k);
  }
  out.push_back(kSep);
  return out;
}

int64_t count_labels(const TokenSequence& masked) {
  return std::ranges::count_if(masked.labels, [](int32_t label) { return label >= 0; });
}

// Expects n p of n draws within 5 standard deviations.
void expect_share(int64_t count, int64_t n, double p) {
  const double expected = static_cast<double>(n) * p;
  EXPECT_NEAR(static_cast<double>(count), expected, 5 * std::sqrt(expected * (1 - p)));
}

TEST(Masking, WordsAreChosenTogetherAndAtTheirFrequency) {
  const auto tokenizer = word_tokenizer();
  const Masking masking(*tokenizer, {}, 7);
  const Window window = make_window(300);
  int64_t words = 0, chosen = 0, tokens = 0, masked = 0, random = 0, kept = 0;
  for (int64_t index = 0; index < 100; ++index) {
    const TokenSequence out = masking.apply(window, 3, index);
    ASSERT_EQ(out.tokens.size(), window.size());
    ASSERT_EQ(out.labels.size(), window.size());
    for (size_t i = 0; i < window.size(); ++i) {
      const bool is_chosen = out.labels[i] >= 0, continues = window[i] >= 105;
      if (window[i] < kFirstWord || !is_chosen) {
        EXPECT_EQ(out.tokens[i], window[i]);
        EXPECT_EQ(out.labels[i], -1);
      } else {
        EXPECT_EQ(out.labels[i], window[i]);
        EXPECT_TRUE(out.tokens[i] == kMaskId || !tokenizer->is_special(out.tokens[i]));
        ++tokens;
        masked += out.tokens[i] == kMaskId;
        kept += out.tokens[i] == window[i];
        random += out.tokens[i] != kMaskId && out.tokens[i] != window[i];
      }
      if (continues) {
        EXPECT_EQ(is_chosen, out.labels[i - 1] >= 0);
      }
      if (window[i] < kFirstWord || continues) continue;
      ++words;
      chosen += is_chosen;
    }
  }
  EXPECT_EQ(words, 30'000);
  expect_share(chosen, words, 0.15);
  expect_share(masked, tokens, 0.8);
  // One in 102 random tokens is the one that it replaces.
  expect_share(random, tokens, 0.1 * 101 / 102);
  expect_share(kept, tokens, 0.1 + 0.1 / 102);
}

TEST(Masking, RandomTokensAreAllThatAreNotSpecial) {
  const auto tokenizer = word_tokenizer();
  const Masking masking(*tokenizer, {.probability = 1, .mask = 0, .random = 1}, 1);
  std::map<int32_t, int64_t> counts;
  const Window window = make_window(300);
  int64_t n = 0;
  for (int64_t index = 0; index < 100; ++index) {
    const TokenSequence out = masking.apply(window, 0, index);
    EXPECT_EQ(out.tokens.front(), kCls);
    EXPECT_EQ(out.tokens.back(), kSep);
    for (size_t i = 1; i + 1 < window.size(); ++i, ++n) ++counts[out.tokens[i]];
  }
  EXPECT_EQ(counts.size(), 102u);
  EXPECT_EQ(counts.begin()->first, kFirstWord);
  for (const auto& [id, count] : counts) expect_share(count, n, 1.0 / 102);
}

TEST(Masking, SingleTokensAreChosenByThemselves) {
  const auto tokenizer = word_tokenizer();
  const Masking masking(*tokenizer, {.whole_words = false}, 7);
  const Window window = make_window(300);
  int64_t chosen = 0, apart = 0;
  for (int64_t index = 0; index < 100; ++index) {
    const TokenSequence out = masking.apply(window, 3, index);
    chosen += count_labels(out);
    for (size_t i = 1; i < window.size(); ++i)
      apart += window[i] >= 105 && (out.labels[i] >= 0) != (out.labels[i - 1] >= 0);
  }
  expect_share(chosen, 100 * std::ssize(window) - 200, 0.15);
  EXPECT_GT(apart, 5000);
}

TEST(Masking, AtLeastOneWordOfAWindow) {
  const auto tokenizer = word_tokenizer();
  const Masking never(*tokenizer, {.probability = 0, .mask = 1, .random = 0}, 5);
  const Window window = make_window(6);  // words of 1, 2, 3, 1, 2 and 3 tokens
  std::map<int32_t, int64_t> counts;     // by the word's first token
  for (int64_t index = 0; index < 6000; ++index) {
    const TokenSequence out = never.apply(window, 0, index);
    const auto first = std::ranges::find_if(out.labels, [](int32_t label) { return label >= 0; });
    ASSERT_NE(first, out.labels.end());
    EXPECT_EQ(count_labels(out), 1 + (*first - kFirstWord) % 3);
    ++counts[*first];
  }
  EXPECT_EQ(counts.size(), 6u);
  for (const auto& [id, count] : counts) expect_share(count, 6000, 1.0 / 6);
  // Special tokens are chosen only where there is nothing else.
  EXPECT_EQ(count_labels(never.apply(Window{kCls, 1, 1, kSep}, 0, 0)), 1);
  EXPECT_EQ(never.apply(Window{kCls, 9, kSep}, 0, 0).labels, (Window{-1, 9, -1}));
  EXPECT_TRUE(never.apply({}, 0, 0).tokens.empty());
}

TEST(Masking, EveryDrawIsAddressed) {
  const auto tokenizer = word_tokenizer();
  const Masking masking(*tokenizer, {}, 7), again(*tokenizer, {}, 7), other(*tokenizer, {}, 8);
  const Window window = make_window(200);
  const auto labels = [&](const Masking& m, int64_t step, int64_t index) {
    return m.apply(window, step, index).labels;
  };
  const auto expected = labels(masking, 5, 2);
  std::set<Window> all{expected};
  for (const int64_t index : {7, 2, 0}) labels(again, 5, index);  // any order
  EXPECT_EQ(labels(again, 5, 2), expected);
  EXPECT_EQ(masking.apply(window, 5, 2).tokens, again.apply(window, 5, 2).tokens);
  EXPECT_EQ(labels(masking, -1, 3), labels(again, -1, 3));
  for (const int64_t step : {-1, 4, 6}) all.insert(labels(masking, step, 2));
  all.insert(labels(masking, 5, 3));
  all.insert(labels(other, 5, 2));
  EXPECT_EQ(all.size(), 6u);
  // The words before do not move the draws of those after.
  Window longer = window;
  longer.insert(longer.end() - 1, {kFirstWord, kFirstWord + 1});
  auto begin = masking.apply(longer, 5, 2).labels;
  begin.erase(begin.end() - 3, begin.end() - 1);
  EXPECT_EQ(begin, expected);
}

// The tokens that are chosen with one of them, as a text with bars between words.
std::string words_of(const Tokenizer& tokenizer, const std::string& text) {
  const Masking masking(tokenizer, {.probability = 0, .mask = 0, .random = 0}, 3);
  const Window window = tokenizer.encode(text);
  std::set<std::pair<size_t, size_t>> words;
  for (int64_t index = 0; index < 1000; ++index) {
    const Window labels = masking.apply(window, 0, index).labels;
    size_t begin = 0;
    while (labels[begin] < 0) ++begin;
    size_t end = begin;
    while (end < labels.size() && labels[end] >= 0) ++end;
    words.emplace(begin, end);
  }
  std::string out;
  for (const auto& [begin, end] : words) {
    if (begin > 0) out += "|";
    for (size_t i = begin; i < end; ++i) out += tokenizer.token_text(window[i]).bytes;
  }
  return out;
}

TEST(Masking, WordsOfByteLevelTokensAreRunsOfLettersAndDigits) {
  BpeTrainer trainer({.vocab_size = 262, .special = {"<end>", "<mask>"}});
  trainer.add_text("abc abc abc abc");
  const auto bytes = make_tokenizer(trainer.train(), "folder");
  EXPECT_EQ(words_of(*bytes, "abc abab don't 17x, -y"), "abc| |abab| |don|'|t| |17x|,| |-|y");
  // The bytes of a character are one word, with the letters around it.
  EXPECT_EQ(words_of(*bytes, "caféx é é\u0301 \u20ac😀a हिन्दी"),
            "caféx| |é| |é\u0301| |\u20ac|😀|a| |हिन्दी");
}

TEST(Masking, WordsOfWordPieceAreItsPrefix) {
  const auto tokenizer = word_tokenizer();
  EXPECT_EQ(words_of(*tokenizer, "w1x w2 w3xy"), " w1x| w2| w3xy");
  const Masking masking(*tokenizer, {.probability = 0, .mask = 1, .random = 0}, 3);
  // Nothing continues a special token, or precedes a window.
  EXPECT_EQ(masking.apply(Window{kSep, 105, kSep}, 0, 0).labels, (Window{-1, 105, -1}));
  EXPECT_EQ(masking.apply(Window{105, 106}, 0, 0).tokens, (Window{kMaskId, kMaskId}));
}

TEST(Masking, WhatCannotBeMaskedIsRefused) {
  EXPECT_THROW_WITH(Masking(*make_byte_tokenizer(), {}, 0), InputError,
                    "has no mask token; hint: name it as mask_token in tokenizer_config.json");
  EXPECT_THROW_WITH(Masking(*word_tokenizer(), {.mask = 0.8, .random = 0.3}, 0), InputError,
                    "mlm: mask + random is 1.1; hint: at most 1");
  EXPECT_NO_THROW((MaskingConfig{.mask = 0.9, .random = 0.1}.validate()));
  const Masking masking(*word_tokenizer(), {}, 0);
  EXPECT_THROW(masking.apply(Window{107}, 0, 0), Error);
  EXPECT_THROW(masking.apply(Window{-1}, 0, 0), Error);
}

}  // namespace
}  // namespace cohort
