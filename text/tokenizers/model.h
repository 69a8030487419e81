// The models of tokenizer.json: they split a word into tokens.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "text/json.h"
#include "text/tokenizers/pre_tokenizer.h"
#include "text/tokenizers/vocabulary.h"

namespace cohort {

class Model {
 public:
  virtual ~Model() = default;
  // Appends the ids of a non-empty word. Throws InputError if it cannot be encoded.
  virtual void encode(std::string_view word, std::vector<int32_t>& ids) const = 0;
  // True if splitting a word before `character` never changes its ids, provided that the text
  // before the split does not end with `character`.
  virtual bool splits_before(std::string_view /*character*/) const { return false; }
};

// kBytes if the model of this JSON can read bytes instead of GPT-2's characters for them.
WordText preferred_word_text(const Json& json);
// From the value of "model"; adds its tokens to `vocabulary`. Throws InputError.
std::unique_ptr<Model> make_model(const Json& json, WordText words, Vocabulary& vocabulary);

}  // namespace cohort
