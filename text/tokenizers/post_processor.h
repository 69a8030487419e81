// The post-processors of tokenizer.json: special tokens before and after a text.
#pragma once

#include <cstdint>
#include <vector>

#include "text/json.h"

namespace cohort {

struct SurroundingTokens {
  std::vector<int32_t> before, after;
};

// From the value of "post_processor". Throws InputError naming an unknown component.
SurroundingTokens read_post_processor(const Json& json);

}  // namespace cohort
