// The pre-tokenizers of tokenizer.json: they split a normalised text into words.
#pragma once

#include <functional>
#include <string_view>

#include "text/json.h"
#include "text/tokenizers/work.h"

namespace cohort {

// A non-empty part of a text.
struct Piece {
  std::string_view text;
  bool starts_text;  // begins the whole text
};
using PieceSink = std::function<void(Piece)>;

// Calls `sink` with each word of `piece` in order; a word is valid during the call only. Throws
// InputError if the budget `work` is exceeded.
using PreTokenizer = std::function<void(Piece piece, Work& work, const PieceSink& sink)>;

// Representation of the words passed to a model.
enum class WordText {
  kCharacters,
  kBytes,  // raw bytes: a trailing ByteLevel was omitted
};
struct PreTokenization {
  PreTokenizer split;  // null: the text is one word
  WordText words = WordText::kCharacters;
};

// From the value of "pre_tokenizer". `preferred` is kBytes if the model can read raw bytes instead
// of GPT-2's characters for them. Throws InputError naming an unknown component.
PreTokenization make_pre_tokenizer(const Json& json, WordText preferred);

}  // namespace cohort
