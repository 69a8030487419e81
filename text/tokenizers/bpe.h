// Byte pair encoding (Sennrich et al., 2016): adjacent tokens are merged in the order of a list.
#pragma once

#include "text/tokenizers/pair_map.h"
#include "text/tokenizers/pipeline.h"

namespace cohort {

// The merge of a pair of adjacent ids.
struct Merge {
  static constexpr uint32_t kNone = UINT32_MAX;
  uint32_t rank = kNone;  // earlier merges have lower ranks
  int32_t id = -1;
};

// Merges the word ids[begin:] in place, lowest rank first and of equal ranks the leftmost, in
// O(n log n). Resizes `ids` to the result.
void merge_all(const PairMap<Merge>& merges, std::vector<int32_t>& ids, size_t begin);

// Some exports turn the no-break spaces of Llama 2's tokens into spaces. Merges written as "a b"
// show it: a second space is otherwise impossible there. The spaces of the tokens then stand for
// no-break spaces.
bool has_lost_spaces(const Json& merge);
std::string with_no_break_spaces(std::string_view token);

std::unique_ptr<Model> make_bpe(const Json& json, WordText words, Vocabulary& vocabulary);

}  // namespace cohort
