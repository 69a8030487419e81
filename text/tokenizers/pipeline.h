// The components of a tokenizer.json, each made from its value there: normaliser, pre-tokenizer,
// model, post-processor and decoder. The functions that make them throw InputError naming an
// unknown component.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "text/json.h"
#include "text/tokenizer.h"
#include "text/tokenizers/vocabulary.h"
#include "text/tokenizers/work.h"

namespace cohort {

// ---- Normalisers: applied to a text before it is split -----------------------------------------

// `text` is UTF-8 before and after. Throws InputError if the budget `work` is exceeded.
using Normalizer = std::function<void(std::string& text, Work& work)>;

// From the value of "normalizer"; null if it is null.
Normalizer make_normalizer(const Json& json);

// ---- Pre-tokenizers: they split a normalised text into words -----------------------------------

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
// of GPT-2's characters for them.
PreTokenization make_pre_tokenizer(const Json& json, WordText preferred);

// ---- Models: they split a word into tokens -----------------------------------------------------

class Model {
 public:
  virtual ~Model() = default;
  // Appends the ids of a non-empty word. Throws InputError if it cannot be encoded.
  virtual void encode(std::string_view word, std::vector<int32_t>& ids) const = 0;
  // True if splitting a word before `character` never changes its ids, provided that the text
  // before the split does not end with `character`.
  virtual bool splits_before(std::string_view /*character*/) const { return false; }
  // Begins the tokens inside a word, if not empty.
  virtual std::string_view continuing_prefix() const { return {}; }
};

// kBytes if the model of this JSON can read bytes instead of GPT-2's characters for them.
WordText preferred_word_text(const Json& json);
// From the value of "model"; adds its tokens to `vocabulary`.
std::unique_ptr<Model> make_model(const Json& json, WordText words, Vocabulary& vocabulary);

// ---- Post-processors: special tokens around a text, or a pair of texts -------------------------

// From the value of "post_processor". `pair` is empty if the file has no template with both texts.
TextTemplates read_post_processor(const Json& json);

// ---- Decoders: they convert a stream of tokens to text -----------------------------------------

// One step of a decoder, with its state for one text.
class DecodeStep {
 public:
  using Sink = std::function<void(std::string_view)>;
  virtual ~DecodeStep() = default;
  // Takes the next token, or the next part of a fused token, and outputs the text that is final.
  virtual void push(std::string_view token, Work& work, const Sink& out) = 0;
  // Outputs the text that was held back.
  virtual void finish(Work& /*work*/, const Sink& /*out*/) {}
  // Discards the text held back, except the first bytes of a character, which become part of the
  // text if later tokens complete it.
  virtual void discard() {}
  virtual std::unique_ptr<DecodeStep> clone() const = 0;
};

// A decoder, with its state for one text: a copy of a new one decodes another text.
class Decoder {
 public:
  // From the value of "decoder".
  explicit Decoder(const Json& json);
  Decoder(const Decoder& other);
  // Returns the text that is final now. The full text is the concatenation of all results and
  // peek().
  std::string push(std::string_view token, Work& work);
  std::string peek(Work& work) const { return Decoder(*this).finish(work); }
  void discard(Work& work);

 private:
  void push(size_t step, std::string_view token, Work& work, std::string& text);
  std::string finish(Work& work);

  std::vector<std::unique_ptr<DecodeStep>> steps_;  // in order
  bool has_tokens_ = false;
  std::string discarded_;  // prefix that steps on the whole text will return again
};

}  // namespace cohort
