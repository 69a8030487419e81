#include "trainers/dataset.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "core/log.h"
#include "core/parallel.h"
#include "data/chat.h"
#include "data/file.h"
#include "data/loader.h"
#include "data/utf8.h"
#include "trainers/files.h"

namespace cohort {
namespace {

// Held-out problems are the same for every seed, so that runs can be compared.
constexpr uint64_t kHeldOutSeed = 0;

void add_characters(const ExampleSet& set, CharacterSet& found) {
  for (int64_t i = 0; i < set.size(); ++i) {
    const Example e = set.get(i);
    for (const std::string* text : {&e.prompt, &e.answer, &e.solution}) found.add(*text);
  }
}

// Of one file its own checksum, of several that of their names and checksums.
std::string files_checksum(const std::vector<std::string>& files) {
  uint64_t sum = 0;
  for (const std::string& file : files) {
    open_input_file(file);  // says more about a path that is wrong
    const std::string own = file_checksum(file);
    if (files.size() == 1) return own;
    sum = checksum(own, checksum(file.substr(file.rfind('/') + 1), sum));
  }
  return hex(sum);
}

// The files of each entry of the data, and their checksums.
struct Fingerprint {
  std::vector<std::vector<std::string>> files;
  std::vector<std::string> checksums;
  std::vector<std::string> eval_files;
  std::string eval_checksum;
  std::string text;  // of all: what data.fingerprint has
};

// Throws InputError if a file is not the one that was meant.
Fingerprint checked_fingerprint(const DataConfig& data) {
  const bool is_text = !data.text.empty();
  const std::vector<std::string>& paths = is_text ? data.text : data.jsonl.path;
  const std::vector<std::string>& eval_paths = is_text ? data.eval_text : data.jsonl.eval_path;
  Fingerprint out;
  if (paths.empty()) return out;
  for (const std::string& path : paths) out.files.push_back(text_files(path));
  for (const auto& files : out.files) {
    out.checksums.push_back(files_checksum(files));
    out.text += (out.text.empty() ? "" : "+") + out.checksums.back();
  }
  const std::string first = out.text;
  if (!eval_paths.empty()) {
    for (const std::string& path : eval_paths)
      for (const std::string& file : text_files(path)) out.eval_files.push_back(file);
    out.eval_checksum = files_checksum(out.eval_files);
    out.text += "+" + out.eval_checksum;
  }
  if (!data.fingerprint.empty() && data.fingerprint != out.text)
    throw InputError(
        str(!eval_paths.empty() && data.fingerprint.starts_with(first) ? eval_paths[0] : paths[0],
            " is not the file that was meant: its fingerprint is ", out.text, ", expected ",
            data.fingerprint,
            "; hint: restore the file, or accept this one with data.fingerprint=", out.text));
  return out;
}

// How many of `tokens`, which are those of `text`, come before a byte of it: as many as the text
// before the byte has in common with them.
size_t tokens_before(size_t byte, std::string_view text, std::span<const int32_t> tokens,
                     const Tokenizer& tokenizer) {
  const std::vector<int32_t> before = tokenizer.encode(text.substr(0, byte), SpecialTokens::kNone);
  const auto [first, second] =
      std::mismatch(before.begin(), before.end(), tokens.begin(), tokens.end());
  return static_cast<size_t>(first - before.begin());
}

// Examples as conversations in the text that the model's chat template makes of them.
class ChatSet final : public ExampleSet {
 public:
  enum class Purpose { kTeach, kAsk };
  ChatSet(std::unique_ptr<ExampleSet> examples, std::shared_ptr<const ChatFormat> format,
          const std::string& system, Purpose purpose)
      : examples_(std::move(examples)),
        format_(std::move(format)),
        system_(system),
        purpose_(purpose) {}

  int64_t size() const override { return examples_->size(); }
  Example get(int64_t index) const override {
    Example example = examples_->get(index);
    try {
      render(example);
    } catch (const InputError& e) {
      throw InputError(str(example.where, example.where.empty() ? "" : ": ", e.what()));
    }
    return example;
  }

 private:
  void render(Example& example) const {
    Json::Array messages;
    if (!system_.empty()) messages.push_back(make_message("system", system_));
    if (example.messages.is_null()) {
      messages.push_back(make_message("user", example.prompt));
      messages.push_back(make_message("assistant", example.solution));
    } else {
      const Json::Array& given = example.messages.as_array();
      messages.insert(messages.end(), given.begin(), given.end());
    }
    example.special = SpecialTokens::kNone;
    if (purpose_ == Purpose::kTeach) {
      ChatFormat::Conversation all = format_->conversation(messages);
      const size_t last = all.assistant.back().first;
      example.prompt = all.text.substr(0, last);
      example.solution = all.text.substr(last);
      example.learned = std::move(all.assistant);
      return;
    }
    // The model is to say what the data may have the assistant say.
    if (messages.back().at("role").as_string() == "assistant") messages.pop_back();
    example.prompt = format_->prompt(messages);
  }

  std::unique_ptr<ExampleSet> examples_;
  std::shared_ptr<const ChatFormat> format_;
  std::string system_;
  Purpose purpose_;
};

std::shared_ptr<const ChatFormat> chat_format(const DataConfig& data, const Tokenizer& tokenizer) {
  return std::make_shared<ChatFormat>(
      tokenizer, parse_template_kwargs(data.chat_template_kwargs, "data.chat_template_kwargs"));
}

// Makes `out.tokenizer` of the characters of a text, or of bytes, if there is none.
using NeedTokenizer = std::function<void(const std::function<std::string()>&)>;

void load_text(const DataConfig& data, const Fingerprint& fingerprint, Dataset& out,
               const NeedTokenizer& need_tokenizer) {
  std::vector<TextCorpus> sources;
  std::vector<TextSpan> all;
  for (const auto& files : fingerprint.files) {
    sources.emplace_back(files, data.eval_text.empty() ? data.held_out_fraction : 0);
    for (const auto* part : {&sources.back().train(), &sources.back().held_out()})
      all.insert(all.end(), part->begin(), part->end());
  }
  if (!data.eval_text.empty()) {
    const TextCorpus& evaluation = sources.emplace_back(fingerprint.eval_files, 0);
    all.insert(all.end(), evaluation.train().begin(), evaluation.train().end());
  }
  need_tokenizer([&] { return TextPieces(all).characters(); });
  const auto tokens_of = [&](const TextCorpus& corpus, const std::vector<TextSpan>& part,
                             const std::string& checksum) {
    std::optional<int32_t> end;
    if (corpus.has_ends() || fingerprint.files.size() > 1) end = out.tokenizer->eos_id();
    return load_tokens(part, *out.tokenizer, end, {data.cache_dir, checksum});
  };
  for (size_t i = 0; i < fingerprint.files.size(); ++i) {
    const std::string& checksum = fingerprint.checksums[i];
    TokenStream tokens = tokens_of(sources[i], sources[i].train(), checksum);
    out.text_weights.push_back(data.weights.empty() ? static_cast<double>(tokens.size())
                                                    : data.weights[i]);
    out.train_text.push_back(std::move(tokens));
    out.held_out_text.append(tokens_of(sources[i], sources[i].held_out(), checksum));
  }
  if (!data.eval_text.empty())
    out.held_out_text.append(
        tokens_of(sources.back(), sources.back().train(), fingerprint.eval_checksum));
}

}  // namespace

Dataset load_dataset(const TrainConfig& config, std::unique_ptr<Tokenizer> tokenizer) {
  const DataConfig& data = config.data;
  Dataset out;
  out.tokenizer = std::move(tokenizer);
  const Fingerprint fingerprint = checked_fingerprint(data);
  out.fingerprint = fingerprint.text;
  if (out.tokenizer == nullptr && !data.tokenizer_path.empty())
    out.tokenizer = load_tokenizer(data.tokenizer_path);
  const auto need_tokenizer = [&](const auto& text) {
    if (out.tokenizer != nullptr) return;
    out.tokenizer = data.tokenizer == TokenizerType::kByte ? make_byte_tokenizer()
                                                           : make_char_tokenizer(text());
  };
  if (!data.text.empty()) {
    load_text(data, fingerprint, out, need_tokenizer);
    return out;
  }
  std::unique_ptr<ExampleSet>& held_out = out.held_out_set;
  if (!data.task.empty()) {
    out.task = &find_task(data.task);
    out.train = make_task_set(*out.task, data.task_sizes, Split::kTrain,
                              static_cast<uint64_t>(config.seed), 0);
    held_out =
        make_task_set(*out.task, data.task_sizes, Split::kHeldOut, kHeldOutSeed, config.eval.size);
    need_tokenizer([&] { return std::string(out.task->alphabet); });
  } else {
    JsonlSplits splits = load_jsonl(data.jsonl);
    out.train = std::move(splits.train);
    out.source_sizes = std::move(splits.source_sizes);
    held_out = std::move(splits.held_out);
    need_tokenizer([&] {
      CharacterSet found;
      for (const ExampleSet* set : {out.train.get(), held_out.get()}) add_characters(*set, found);
      return found.text();
    });
  }
  if (data.is_chat()) {
    const auto format = chat_format(data, *out.tokenizer);
    const auto purpose =
        config.trainer == TrainerType::kSft ? ChatSet::Purpose::kTeach : ChatSet::Purpose::kAsk;
    out.train = std::make_unique<ChatSet>(std::move(out.train), format, data.system, purpose);
    held_out = std::make_unique<ChatSet>(std::move(held_out), format, data.system, purpose);
  }
  return out;
}

TextWindow text_window(const Dataset& data, int64_t context, uint64_t seed, int64_t i) {
  const size_t source =
      data.train_text.size() == 1 ? 0 : weighted_choice(data.text_weights, seed, i);
  const TokenStream& tokens = data.train_text[source];
  return {tokens, random_window(tokens.size(), context + 1, seed, i)};
}

MixedOrder make_order(const TrainConfig& config, const Dataset& data) {
  const bool mixed = !config.data.weights.empty();
  const std::vector<int64_t> sizes = mixed ? data.source_sizes : std::vector{data.train->size()};
  const std::vector<double> weights = mixed ? config.data.weights : std::vector{1.0};
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  const int64_t picks =
      config.steps *
      (config.trainer == TrainerType::kGrpo ? config.prompts_per_step : config.batch_size);
  std::vector<ShuffledOrder> orders;
  auto difficulty = data.difficulty.begin();
  for (size_t i = 0; i < sizes.size(); ++i) {
    ShuffledOrder::Options options{
        .span = static_cast<int64_t>(static_cast<double>(picks) * weights[i] / sum), .source = i};
    if (!data.difficulty.empty()) {
      options.difficulty.assign(difficulty, difficulty + sizes[i]);
      difficulty += sizes[i];
    }
    orders.emplace_back(sizes[i], static_cast<uint64_t>(config.seed), std::move(options));
  }
  return MixedOrder(std::move(orders), sizes, weights);
}

Example prompt_of(const TrainConfig& config, const Tokenizer& tokenizer, const Json& fields,
                  const std::string& where) {
  const DataConfig& data = config.data;
  Example example = read_prompt(data.jsonl, fields, where);
  if (!data.is_chat()) return example;
  std::vector<Example> one{std::move(example)};
  return ChatSet(make_example_set(std::move(one)), chat_format(data, tokenizer), data.system,
                 ChatSet::Purpose::kAsk)
      .get(0);
}

SamplingConfig sampling_for(const TrainConfig& config, const Tokenizer& tokenizer) {
  SamplingConfig sampling = config.sampling;
  if (!config.data.is_chat()) return sampling;
  if (const auto end = chat_format(config.data, tokenizer)->end_of_turn(tokenizer))
    sampling.stop_tokens.push_back(*end);
  return sampling;
}

std::vector<int32_t> supervised_tokens(const Example& example, const Tokenizer& tokenizer) {
  if (!example.learned.empty())
    return tokenizer.encode(example.prompt + example.solution, example.special);
  std::vector<int32_t> tokens = encode_prompt(example, tokenizer);
  const std::vector<int32_t> solution = tokenizer.encode(example.solution);
  tokens.insert(tokens.end(), solution.begin(), solution.end());
  tokens.push_back(tokenizer.eos_id());
  return tokens;
}

TokenSequence supervised_sequence(const Example& example, const Tokenizer& tokenizer,
                                  int64_t context, TooLong too_long) {
  TokenSequence sequence{.tokens = supervised_tokens(example, tokenizer)};
  if (example.learned.empty()) {
    const size_t prompt = encode_prompt(example, tokenizer).size();
    if (prompt == 0) throw InputError("the prompt is empty");
    sequence.loss_mask.assign(prompt, 0);
    sequence.loss_mask.resize(sequence.tokens.size(), 1);
  } else {
    const std::string text = example.prompt + example.solution;
    sequence.loss_mask.assign(sequence.tokens.size(), 0);
    for (const auto& [begin, end] : example.learned) {
      const auto place = [&](size_t byte) {
        return sequence.loss_mask.begin() +
               static_cast<std::ptrdiff_t>(
                   byte == text.size() ? sequence.tokens.size()
                                       : tokens_before(byte, text, sequence.tokens, tokenizer));
      };
      std::fill(place(begin), place(end), 1);
    }
  }
  const auto most = static_cast<size_t>(context + 1);
  if (too_long == TooLong::kTruncate)
    sequence.tokens.resize(std::min(sequence.tokens.size(), most));
  sequence.loss_mask.resize(sequence.tokens.size());
  if (sequence.tokens.size() > most)
    throw InputError(str("prompt, solution and end of sequence have ", sequence.tokens.size(),
                         " tokens, the model's context is ", context,
                         "; hint: a larger model.context"));
  return sequence;
}

}  // namespace cohort
