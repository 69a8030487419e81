// The pre-tokenizers of tokenizer.json: they split a normalised text into words.
#pragma once

#include <functional>
#include <memory>
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

class PreTokenizer {
 public:
  virtual ~PreTokenizer() = default;
  // Calls `sink` with each word in order; a word is valid during the call only. Throws InputError
  // if the budget `work` is exceeded.
  virtual void split(Piece piece, Work& work, const PieceSink& sink) const = 0;
};

// Representation of the words passed to a model.
enum class WordText {
  kCharacters,
  kBytes,  // raw bytes: a trailing ByteLevel was omitted
};
struct PreTokenization {
  std::unique_ptr<PreTokenizer> splitter;  // nullptr: the text is one word
  WordText words = WordText::kCharacters;
};

// From the value of "pre_tokenizer". `preferred` is kBytes if the model can read raw bytes instead
// of GPT-2's characters for them. Throws InputError naming an unknown component.
PreTokenization make_pre_tokenizer(const Json& json, WordText preferred);

}  // namespace cohort
