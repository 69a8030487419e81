// Training of a byte-level BPE tokenizer (Sennrich et al., 2016): the most frequent adjacent pair
// repeatedly becomes a token.
#pragma once

#include "text/tokenizer.h"
#include "text/tokenizers/matcher.h"
#include "text/tokenizers/splitters.h"
#include "text/tokenizers/vocabulary.h"

namespace cohort {

struct BpeTrainerOptions {
  int64_t vocab_size = 32000;          // includes the 256 bytes and the special tokens
  const char* pattern = kQwenPattern;  // must be known to find_splitter()
  std::vector<std::string> special = {"<|endoftext|>"};  // the first one is end-of-sequence
};

class BpeTrainer {
 public:
  // Throws InputError for a vocabulary that is too small or special tokens that are empty or given
  // twice.
  explicit BpeTrainer(BpeTrainerOptions options);
  // Counts the words of a text, without special tokens. Throws InputError for text that is not
  // UTF-8.
  void add_text(std::string_view text);
  // Returns the files tokenizer.json and tokenizer_config.json, which depend on the counts only.
  // The vocabulary is smaller than requested if no repeated pair is left.
  NamedFiles train() const;

 private:
  void add_word(std::string_view word);

  BpeTrainerOptions options_;
  LeftmostLongest special_;
  TextMap<int64_t> counts_;  // by word
};

}  // namespace cohort
