// A search pattern of tokenizer.json: {"String": ...} or {"Regex": ...}.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "text/json.h"
#include "text/regex.h"
#include "text/tokenizers/work.h"

namespace cohort {

class Pattern {
 public:
  // Throws InputError.
  explicit Pattern(const Json& json);

  // The regular expression; "" for a fixed text.
  const std::string& regex() const { return regex_text_; }
  // Calls found(begin, end) for each non-overlapping match from left to right.
  void find_all(std::string_view text, Work& work,
                const std::function<void(size_t, size_t)>& found) const;
  // Returns `text` with each match replaced by `content`.
  std::string replace_all(std::string_view text, std::string_view content, Work& work) const;

 private:
  std::string text_, regex_text_;
  std::optional<Regex> regex_;
};

}  // namespace cohort
