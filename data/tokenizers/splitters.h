// Hand-written splitters for the patterns that nearly all byte-level tokenizers have.
#pragma once

#include <cstddef>
#include <string_view>

namespace cohort {

// The end of the word that starts at `at` < text.size(). `text` must be UTF-8. Words cover a text
// without gaps.
using Splitter = size_t (*)(std::string_view text, size_t at);

extern const char* const kGpt2Pattern;
extern const char* const kQwenPattern;
extern const char* const kLlama3Pattern;

size_t end_of_gpt2_word(std::string_view text, size_t at);

// The function that finds what the regular expression `pattern` matches, nullptr if there is none.
Splitter find_splitter(std::string_view pattern);

}  // namespace cohort
