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
};

// The steps of one text, in order.
class DecodeSteps {
 public:
  explicit DecodeSteps(std::vector<std::unique_ptr<DecodeStep>> steps) : steps_(std::move(steps)) {}
  // What is certain of the text now. All that was returned, in order, is the text.
  std::string push(std::string_view token, Work& work);
  std::string finish(Work& work);

 private:
  void push(size_t step, std::string_view token, Work& work, std::string& text);

  std::vector<std::unique_ptr<DecodeStep>> steps_;
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
