// The post-processors of tokenizer.json: the special tokens around a text.
#pragma once

#include <cstdint>
#include <vector>

#include "data/json.h"

namespace cohort {

struct AroundText {
  std::vector<int32_t> before, after;
};

// From the value of "post_processor". Throws InputError naming what it does not know.
AroundText read_post_processor(const Json& json);

}  // namespace cohort
