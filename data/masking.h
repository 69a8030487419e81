// Targets of masked language models (Devlin et al., 2018): some words of a window are hidden, and
// their tokens are the labels.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "config/visitor.h"
#include "data/packing.h"
#include "text/tokenizer.h"

namespace cohort {

struct MaskingConfig {
  double probability = 0.15, mask = 0.8, random = 0.1;
  bool whole_words = true;
  void visit(ConfigVisitor& v) {
    const Range fraction{.min = 0, .max = 1};
    v.field("probability", probability, "fraction of the words that are predicted", fraction);
    v.field("mask", mask, "fraction of their tokens that the mask token replaces", fraction);
    v.field("random", random, "fraction of them that a random token replaces", fraction);
    v.field("whole_words", whole_words, "yes: words are chosen; no: single tokens");
  }
  // Throws InputError if mask and random exceed 1 together.
  void validate() const;
};

class Masking {
 public:
  // Throws InputError if the tokenizer has no mask token, or none that is not special.
  Masking(const Tokenizer& tokenizer, const MaskingConfig& config, uint64_t seed);

  // The masked window, with the tokens that were there as labels. Depends on its arguments and the
  // constructor's only. `window`: at most 2^20 tokens, all in the tokenizer's vocabulary; its
  // special tokens are predicted only if it has no others. `index`: that of the window in the step.
  // Evaluations have step -1.
  TokenSequence apply(std::span<const int32_t> window, int64_t step, int64_t index) const;

 private:
  bool is_special(int32_t id) const { return texts_[static_cast<size_t>(id)].bytes.empty(); }

  MaskingConfig config_;
  uint64_t seed_;
  int32_t mask_;
  std::vector<TokenText> texts_;   // by id; empty bytes: special
  std::vector<int32_t> ordinary_;  // the ids that random tokens are drawn from
};

}  // namespace cohort
