// The pre-tokenizers of tokenizer.json: how a normalised text becomes words.
#pragma once

#include <functional>
#include <memory>
#include <string_view>

#include "data/json.h"
#include "data/tokenizers/work.h"

namespace cohort {

// A part of a text, never empty.
struct Piece {
  std::string_view text;
  bool at_start;  // of the whole text
};
using PieceSink = std::function<void(Piece)>;

class PreTokenizer {
 public:
  virtual ~PreTokenizer() = default;
  // Calls `sink` with each word in order; what it is given lives during the call. Throws InputError
  // where `work` is not enough.
  virtual void split(Piece piece, Work& work, const PieceSink& sink) const = 0;
};

// What the words of a model are made of.
enum class WordText {
  kCharacters,
  kBytes,  // a trailing ByteLevel was left out: words are the text's own bytes
};
struct PreTokenization {
  std::unique_ptr<PreTokenizer> splitter;  // nullptr: a text is one word
  WordText words = WordText::kCharacters;
};

// From the value of "pre_tokenizer". `wanted`: whether the model can read the bytes themselves
// instead of GPT-2's characters for them. Throws InputError naming what it does not know.
PreTokenization make_pre_tokenizer(const Json& json, WordText wanted);

}  // namespace cohort
