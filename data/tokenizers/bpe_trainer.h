// Learning a byte-level BPE tokenizer from text (Sennrich et al., 2016): the pair of neighbours
// that is most frequent becomes a token, again and again.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer.h"
#include "data/tokenizers/matcher.h"
#include "data/tokenizers/splitters.h"
#include "data/tokenizers/string_map.h"

namespace cohort {

struct BpeTrainerOptions {
  int64_t vocab_size = 32000;          // with the 256 bytes and the special tokens
  const char* pattern = kQwenPattern;  // one that find_splitter() knows
  std::vector<std::string> special = {"<|endoftext|>"};  // the first one is end-of-sequence
};

class BpeTrainer {
 public:
  // Throws InputError for a vocabulary that is too small or special tokens that are empty or given
  // twice.
  explicit BpeTrainer(BpeTrainerOptions options);
  // Counts the words of a text; special tokens in it are none. Throws InputError for text that is
  // not UTF-8.
  void add_text(std::string_view text);
  // The tokenizer's files (tokenizer.json, tokenizer_config.json). They depend on the counts only.
  // The vocabulary is smaller than asked for where no pair is left that the text has twice.
  NamedFiles train() const;

 private:
  void add_word(std::string_view word);

  BpeTrainerOptions options_;
  LeftmostLongest special_;
  StringMap words_;
  std::vector<int64_t> counts_;  // by the value in words_
};

}  // namespace cohort
