// The normalisers of tokenizer.json: what happens to a text before it is split.
#pragma once

#include <memory>
#include <string>

#include "data/json.h"
#include "data/tokenizers/work.h"

namespace cohort {

class Normalizer {
 public:
  virtual ~Normalizer() = default;
  // `text` is UTF-8 before and after. Throws InputError where `work` is not enough.
  virtual void normalize(std::string& text, Work& work) const = 0;
};

// From the value of "normalizer"; nullptr if there is nothing to do. Throws InputError naming what
// it does not know.
std::unique_ptr<Normalizer> make_normalizer(const Json& json);

}  // namespace cohort
