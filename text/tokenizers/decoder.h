// The decoders of tokenizer.json: they convert a stream of tokens to text.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "text/json.h"
#include "text/tokenizers/work.h"

namespace cohort {

using TextSink = std::function<void(std::string_view)>;

// One step of the decoder, with its state for one text.
class DecodeStep {
 public:
  virtual ~DecodeStep() = default;
  // Takes the next token, or the next part of a fused token, and outputs the text that is final.
  virtual void push(std::string_view token, Work& work, const TextSink& out) = 0;
  // Outputs the text that was held back.
  virtual void finish(Work& /*work*/, const TextSink& /*out*/) {}
  // Discards the text held back, except the first bytes of a character, which become part of the
  // text if later tokens complete it.
  virtual void discard() {}
  virtual std::unique_ptr<DecodeStep> clone() const = 0;
};

// The steps of one text, in order.
class DecodeSteps {
 public:
  explicit DecodeSteps(std::vector<std::unique_ptr<DecodeStep>> steps) : steps_(std::move(steps)) {}
  // Returns the text that is final now. The full text is the concatenation of all results and
  // peek().
  std::string push(std::string_view token, Work& work);
  std::string peek(Work& work) const;
  void discard(Work& work);

 private:
  void push(size_t step, std::string_view token, Work& work, std::string& text);
  std::string finish(Work& work);

  std::vector<std::unique_ptr<DecodeStep>> steps_;
  bool has_tokens_ = false;
  std::string discarded_;  // prefix that steps on the whole text will return again
};

class Decoder {
 public:
  // From the value of "decoder". Throws InputError naming an unknown component.
  explicit Decoder(const Json& json);
  DecodeSteps start() const;

 private:
  std::vector<std::unique_ptr<DecodeStep>> steps_;  // in their initial states
};

}  // namespace cohort
