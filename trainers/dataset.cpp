#include "trainers/dataset.h"

#include <algorithm>

#include "core/log.h"
#include "data/loader.h"

namespace cohort {
namespace {

// Held-out problems are the same for every seed, so that runs can be compared.
constexpr uint64_t kHeldOutSeed = 0;

std::string all_text(const ExampleSet& set) {
  std::string text;
  for (int64_t i = 0; i < set.size(); ++i) {
    const Example e = set.get(i);
    text += e.prompt + e.answer + e.solution;
  }
  return text;
}

std::unique_ptr<Tokenizer> tokenizer_for(TokenizerType type, const std::string& text) {
  return type == TokenizerType::kByte ? make_byte_tokenizer() : make_char_tokenizer(text);
}

}  // namespace

Dataset load_dataset(const TrainConfig& config, std::unique_ptr<Tokenizer> tokenizer) {
  const DataConfig& data = config.data;
  Dataset out;
  out.tokenizer = std::move(tokenizer);
  const auto need_tokenizer = [&](const auto& text) {
    if (out.tokenizer == nullptr) out.tokenizer = tokenizer_for(data.tokenizer, text());
  };
  if (!data.text.empty()) {
    const TextCorpus corpus(data.text, data.held_out_fraction);
    need_tokenizer([&] { return corpus.train_text() + corpus.held_out_text(); });
    out.train_tokens = out.tokenizer->encode(corpus.train_text());
    out.held_out_tokens = out.tokenizer->encode(corpus.held_out_text());
    const auto window = config.model.context + 1;
    if (static_cast<int64_t>(out.train_tokens.size()) < window)
      throw InputError(str(data.text, ": the training part has ", out.train_tokens.size(),
                           " tokens, a window needs ", window,
                           "; hint: more text or a smaller model.context"));
    return out;
  }
  std::unique_ptr<ExampleSet> held_out;
  if (!data.task.empty()) {
    out.task = &find_task(data.task);
    out.train = make_task_set(*out.task, data.task_sizes, Split::kTrain,
                              static_cast<uint64_t>(config.seed), 0);
    held_out =
        make_task_set(*out.task, data.task_sizes, Split::kHeldOut, kHeldOutSeed, config.eval.size);
    need_tokenizer([&] { return std::string(out.task->alphabet); });
  } else {
    out.train = load_jsonl(data.jsonl, Split::kTrain);
    held_out = load_jsonl(data.jsonl, Split::kHeldOut);
    need_tokenizer([&] { return all_text(*out.train) + all_text(*held_out); });
  }
  if (held_out->size() < config.eval.size)
    logging::info("eval.size: ", config.eval.size,
                  " held-out problems were asked for, the data have ", held_out->size());
  for (int64_t i = 0; i < std::min(config.eval.size, held_out->size()); ++i)
    out.held_out.push_back(held_out->get(i));
  return out;
}

TokenSequence supervised_sequence(const Example& example, const Tokenizer& tokenizer,
                                  int64_t context) {
  TokenSequence sequence;
  sequence.tokens = tokenizer.encode(example.prompt);
  if (sequence.tokens.empty())
    throw InputError(str("an example has an empty prompt (answer '", example.answer, "')"));
  sequence.learn.assign(sequence.tokens.size(), 0);
  const std::vector<int32_t> solution = tokenizer.encode(example.solution);
  sequence.tokens.insert(sequence.tokens.end(), solution.begin(), solution.end());
  sequence.tokens.push_back(tokenizer.eos_id());
  sequence.learn.resize(sequence.tokens.size(), 1);
  if (static_cast<int64_t>(sequence.tokens.size()) > context + 1)
    throw InputError(str("the example with prompt '", example.prompt, "' has ",
                         sequence.tokens.size(), " tokens, the model's context is ", context,
                         "; hint: a larger model.context"));
  return sequence;
}

}  // namespace cohort
