// The models of tokenizer.json: how one word becomes tokens.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "data/json.h"
#include "data/tokenizers/pre_tokenizer.h"
#include "data/tokenizers/vocabulary.h"

namespace cohort {

class Model {
 public:
  virtual ~Model() = default;
  // Appends the ids of a word, which is not empty. Throws InputError if it cannot be encoded.
  virtual void encode(std::string_view word, std::vector<int32_t>& ids) const = 0;
  // True if the ids of two texts one after the other are those of their concatenation, where the
  // second one starts with `character` and the first one does not end with it.
  virtual bool splits_before(std::string_view character) const {
    (void)character;
    return false;
  }
};

// Whether the model of this JSON reads bytes as it does GPT-2's characters for them.
WordText readable_words(const Json& json);
// From the value of "model"; its tokens go into `vocabulary`. Throws InputError.
std::unique_ptr<Model> make_model(const Json& json, WordText words, Vocabulary& vocabulary);

}  // namespace cohort
