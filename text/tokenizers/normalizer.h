// The normalisers of tokenizer.json, applied to a text before it is split.
#pragma once

#include <memory>
#include <string>

#include "text/json.h"
#include "text/tokenizers/work.h"

namespace cohort {

class Normalizer {
 public:
  virtual ~Normalizer() = default;
  // `text` is UTF-8 before and after. Throws InputError if the budget `work` is exceeded.
  virtual void normalize(std::string& text, Work& work) const = 0;
};

// From the value of "normalizer"; nullptr if it is null. Throws InputError naming an unknown
// component.
std::unique_ptr<Normalizer> make_normalizer(const Json& json);

}  // namespace cohort
