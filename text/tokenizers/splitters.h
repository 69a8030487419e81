// Hand-written splitters for the patterns of nearly all byte-level tokenizers.
#pragma once

#include <cstddef>
#include <string_view>

namespace cohort {

// Returns the end of the word that starts at `at` < text.size(). `text` must be UTF-8. Words cover
// a text without gaps.
using Splitter = size_t (*)(std::string_view text, size_t at);

extern const char* const kGpt2Pattern;
extern const char* const kQwenPattern;
extern const char* const kLlama3Pattern;
extern const char* const kQwen35Pattern;  // Qwen's with marks among the letters

// The splitter equivalent to the regular expression `pattern`, or nullptr.
Splitter find_splitter(std::string_view pattern);

}  // namespace cohort
