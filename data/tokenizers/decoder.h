// The decoders of tokenizer.json: how the texts of tokens become a text, as they arrive.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/json.h"
#include "data/tokenizers/work.h"

namespace cohort {

using TextSink = std::function<void(std::string_view)>;

// One step for one text.
class DecodeStep {
 public:
  virtual ~DecodeStep() = default;
  // Takes the next token, or the next part of the only one, and passes on what is certain by now.
  virtual void push(std::string_view token, Work& work, const TextSink& out) = 0;
  // Passes on what was held back for what might have followed.
  virtual void finish(Work& work, const TextSink& out) { (void)work, (void)out; }
  // Forgets what is held back, but for the first bytes of a character, which become part of the
  // text if the tokens that follow finish it.
  virtual void discard() {}
  virtual std::unique_ptr<DecodeStep> clone() const = 0;
};

// The steps of one text, in order.
class DecodeSteps {
 public:
  explicit DecodeSteps(std::vector<std::unique_ptr<DecodeStep>> steps) : steps_(std::move(steps)) {}
  // The text that is certain now. All that was returned, in order, with peek() at its end, is the
  // text.
  std::string push(std::string_view token, Work& work);
  std::string peek(Work& work) const;
  void discard(Work& work);

 private:
  void push(size_t step, std::string_view token, Work& work, std::string& text);
  std::string finish(Work& work);

  std::vector<std::unique_ptr<DecodeStep>> steps_;
  bool has_tokens_ = false;
  std::string discarded_;  // what steps that need the whole text will return again
};

class Decoder {
 public:
  // From the value of "decoder". Throws InputError naming what it does not know.
  explicit Decoder(const Json& json);
  DecodeSteps start() const;

  using MakeStep = std::function<std::unique_ptr<DecodeStep>()>;

 private:
  std::vector<MakeStep> steps_;
};

}  // namespace cohort
