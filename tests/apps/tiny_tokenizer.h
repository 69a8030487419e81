// Tests of commands on the reference models share a tokenizer for them, and reading of JSON.
#pragma once

#include <string>

#include "tests/support/test_util.h"
#include "text/json.h"

namespace cohort::test {

// A tokenizer of four ids for models of 32 rows.
inline constexpr const char* kTokenizer =
    R"({"added_tokens": [{"id": 0, "content": "</s>", "special": true, "single_word": false,
                          "lstrip": false, "rstrip": false, "normalized": false}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false},
        "model": {"type": "BPE", "merges": [], "vocab": {"</s>": 0, "a": 1, "b": 2, "c": 3}}})";

inline Json json_of(const std::string& path) {
  return parse_json(read_file(path), path);
}

}  // namespace cohort::test
