// The work budget of one call of a tokenizer. A hostile tokenizer.json can multiply a text at every
// step; real ones stay far below these bounds.
#pragma once

#include <cstdint>

#include "core/check.h"

namespace cohort {

class Work {
 public:
  // Budget for a call on `size` bytes of text, or `size` ids.
  explicit Work(size_t size) { allow(size); }
  // Extends the budget by `size` bytes or ids.
  void allow(size_t size) {
    text_left_ += kTextPerByte * size;
    regex_left += kRegexPerByte * static_cast<int64_t>(size);
  }
  // Throws InputError if the steps produce more text than the budget.
  void charge(size_t bytes) {
    if (bytes > text_left_)
      throw InputError(
          "the tokenizer's steps produce too much text for this input; hint: is its file damaged?");
    text_left_ -= bytes;
  }

  int64_t regex_left = 200'000'000;  // units of Regex::find_all()

 private:
  static constexpr size_t kTextPerByte = 64;
  static constexpr int64_t kRegexPerByte = 2'000;

  size_t text_left_ = size_t{32} << 20;  // bytes
};

}  // namespace cohort
