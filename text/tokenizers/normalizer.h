// The normalisers of tokenizer.json, applied to a text before it is split.
#pragma once

#include <functional>
#include <string>

#include "text/json.h"
#include "text/tokenizers/work.h"

namespace cohort {

// `text` is UTF-8 before and after. Throws InputError if the budget `work` is exceeded.
using Normalizer = std::function<void(std::string& text, Work& work)>;

// From the value of "normalizer"; null if it is null. Throws InputError naming an unknown
// component.
Normalizer make_normalizer(const Json& json);

}  // namespace cohort
