#include "trainers/dataset.h"

#include <algorithm>

#include "data/loader.h"
#include "trainers/files.h"

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

// The start of a text, fit for a message.
std::string excerpt(const std::string& text) {
  constexpr size_t kLength = 60;
  std::string out;
  for (const char c : text.substr(0, kLength))
    out += c == '\n' ? std::string("\\n") : std::string(1, c);
  return "'" + out + (text.size() > kLength ? "...'" : "'");
}

// Tokens of the prompt and of what is trained on; throws InputError if the model cannot take them.
std::pair<int64_t, int64_t> checked_lengths(const TrainConfig& config, const Example& example,
                                            const Tokenizer& tokenizer, int64_t context) {
  const auto prompt = static_cast<int64_t>(tokenizer.encode(example.prompt).size());
  if (prompt == 0) throw InputError("the prompt is empty");
  if (prompt >= context)
    throw InputError(str("the prompt has ", prompt, " tokens, the model's context is ", context,
                         ": no room for a completion; hint: a larger model.context or shorter "
                         "prompts"));
  if (config.trainer == TrainerType::kSft)
    return {prompt, supervised_sequence(example, tokenizer, context).tokens.size()};
  return {prompt, prompt};
}

// Of the data file; throws InputError if it is not the one that was meant.
std::string checked_fingerprint(const DataConfig& data) {
  const std::string& path = data.text.empty() ? data.jsonl.path : data.text;
  if (path.empty()) return "";
  const std::string found = file_checksum(path);
  if (!data.fingerprint.empty() && data.fingerprint != found)
    throw InputError(
        str(path, " is not the file that was meant: its fingerprint is ", found, ", expected ",
            data.fingerprint,
            "; hint: restore the file, or accept this one with data.fingerprint=", found));
  return found;
}

}  // namespace

Dataset load_dataset(const TrainConfig& config, std::unique_ptr<Tokenizer> tokenizer) {
  const DataConfig& data = config.data;
  Dataset out;
  out.tokenizer = std::move(tokenizer);
  out.fingerprint = checked_fingerprint(data);
  const auto need_tokenizer = [&](const auto& text) {
    if (out.tokenizer == nullptr) out.tokenizer = tokenizer_for(data.tokenizer, text());
  };
  if (!data.text.empty()) {
    const TextCorpus corpus(data.text, data.held_out_fraction);
    need_tokenizer([&] { return corpus.train_text() + corpus.held_out_text(); });
    out.train_tokens = out.tokenizer->encode(corpus.train_text());
    out.held_out_tokens = out.tokenizer->encode(corpus.held_out_text());
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
  for (int64_t i = 0; i < std::min(config.eval.size, held_out->size()); ++i)
    out.held_out.push_back(held_out->get(i));
  return out;
}

TokenSequence supervised_sequence(const Example& example, const Tokenizer& tokenizer,
                                  int64_t context) {
  TokenSequence sequence;
  sequence.tokens = tokenizer.encode(example.prompt);
  if (sequence.tokens.empty()) throw InputError("the prompt is empty");
  sequence.learn.assign(sequence.tokens.size(), 0);
  const std::vector<int32_t> solution = tokenizer.encode(example.solution);
  sequence.tokens.insert(sequence.tokens.end(), solution.begin(), solution.end());
  sequence.tokens.push_back(tokenizer.eos_id());
  sequence.learn.resize(sequence.tokens.size(), 1);
  if (static_cast<int64_t>(sequence.tokens.size()) > context + 1)
    throw InputError(str("prompt, solution and end of sequence have ", sequence.tokens.size(),
                         " tokens, the model's context is ", context,
                         "; hint: a larger model.context"));
  return sequence;
}

DataLengths check_data(const TrainConfig& config, const Dataset& data, int64_t context) {
  constexpr int64_t kOfEndless = 1000;
  if (config.trainer == TrainerType::kPretrain) {
    const auto tokens = static_cast<int64_t>(data.train_tokens.size());
    if (tokens <= context)
      throw InputError(str(config.data.text, ": the training part has ", tokens,
                           " tokens, a window needs ", context + 1,
                           "; hint: more text or a smaller model.context"));
    return {0, context + 1, static_cast<double>(context + 1)};
  }
  DataLengths out;
  const auto check = [&](const Example& example, const char* kind, int64_t i) {
    try {
      const auto [prompt, sequence] = checked_lengths(config, example, *data.tokenizer, context);
      out.longest_prompt = std::max(out.longest_prompt, prompt);
      out.longest_sequence = std::max(out.longest_sequence, sequence);
      return static_cast<double>(sequence);
    } catch (const InputError& e) {
      throw InputError(str(data.task != nullptr ? data.task->name : config.data.jsonl.path, ": ",
                           kind, " example ", i + 1, ", ", excerpt(example.prompt), ": ",
                           e.what()));
    }
  };
  const int64_t n =
      data.task != nullptr ? std::min(kOfEndless, data.train->size()) : data.train->size();
  for (int64_t i = 0; i < n; ++i)
    out.mean_sequence += check(data.train->get(i), "training", i) / static_cast<double>(n);
  for (size_t i = 0; i < data.held_out.size(); ++i)
    check(data.held_out[i], "held-out", static_cast<int64_t>(i));
  return out;
}

}  // namespace cohort
