// The work that one call of a tokenizer may do. A hostile tokenizer.json can multiply a text with
// every step; real ones stay far below these bounds.
#pragma once

#include <cstdint>

#include "core/check.h"

namespace cohort {

class Work {
 public:
  // For a call on so many bytes of text, or so many ids.
  explicit Work(size_t size) { allow(size); }
  // For so many bytes or ids more.
  void allow(size_t size) {
    text_left_ += kTextPerByte * size;
    regex_left += kRegexPerByte * static_cast<int64_t>(size);
  }
  // Throws InputError when the steps have made too much text.
  void charge(size_t bytes) {
    if (bytes > text_left_)
      throw InputError(
          "the tokenizer's steps make too much text of this input; hint: is its file damaged?");
    text_left_ -= bytes;
  }

  int64_t regex_left = 200'000'000;  // units of Regex::find_all()

 private:
  static constexpr size_t kTextPerByte = 64;
  static constexpr int64_t kRegexPerByte = 2'000;

  size_t text_left_ = size_t{32} << 20;  // bytes
};

}  // namespace cohort
