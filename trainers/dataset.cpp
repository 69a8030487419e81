#include "trainers/dataset.h"

#include <algorithm>
#include <cstdio>
#include <functional>

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

std::string all_text(const ExampleSet& set) {
  std::string text;
  for (int64_t i = 0; i < set.size(); ++i) {
    const Example e = set.get(i);
    text += e.prompt + e.answer + e.solution;
  }
  return text;
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
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(sum));
  return digits;
}

// Of the data files; throws InputError if one is not the one that was meant.
std::string checked_fingerprint(const DataConfig& data) {
  const bool is_text = !data.text.empty();
  const std::string& path = is_text ? data.text : data.jsonl.path;
  const std::string& eval_path = is_text ? data.eval_text : data.jsonl.eval_path;
  if (path.empty()) return "";
  const auto checksum_of = [&](const std::string& text) {
    return files_checksum(is_text ? text_files(text) : std::vector{text});
  };
  const std::string first = checksum_of(path);
  const std::string found = eval_path.empty() ? first : first + "+" + checksum_of(eval_path);
  if (!data.fingerprint.empty() && data.fingerprint != found)
    throw InputError(
        str(!eval_path.empty() && data.fingerprint.starts_with(first) ? eval_path : path,
            " is not the file that was meant: its fingerprint is ", found, ", expected ",
            data.fingerprint,
            "; hint: restore the file, or accept this one with data.fingerprint=", found));
  return found;
}

// Prompt, solution and what ends it. Of a rendered conversation one text, so that its tokens are
// those that the model knows.
std::vector<int32_t> supervised_tokens(const Example& example, const Tokenizer& tokenizer) {
  if (!example.learned.empty())
    return tokenizer.encode(example.prompt + example.solution, example.special);
  std::vector<int32_t> tokens = encode_prompt(example, tokenizer);
  const std::vector<int32_t> solution = tokenizer.encode(example.solution);
  tokens.insert(tokens.end(), solution.begin(), solution.end());
  tokens.push_back(tokenizer.eos_id());
  return tokens;
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
      throw InputError(str(example.line > 0 ? str("line ", example.line, ": ") : "", e.what()));
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

// Checks problems against a model's context, and cuts or leaves out those that are too long.
class ContextCheck {
 public:
  ContextCheck(const TrainConfig& config, const Dataset& data, int64_t context)
      : config_(config),
        task_(data.task),
        tokenizer_(*data.tokenizer),
        context_(context),
        completion_(std::min(config.sampling.max_completion_length, context - 1)) {}

  // The first problems that stay, at most `limit` of `size`.
  std::vector<Example> take(Split split, int64_t size, int64_t limit,
                            const std::function<Example(int64_t)>& get) {
    Part& part = split == Split::kTrain ? train_ : held_out_;
    std::vector<Example> out;
    for (; part.seen < size && static_cast<int64_t>(out.size()) < limit; ++part.seen) {
      Example example = get(part.seen);
      try {
        if (!fit(example, part)) continue;
      } catch (const InputError& e) {
        throw InputError(str(place(example, part), ": ", e.what()));
      }
      out.push_back(std::move(example));
    }
    if (split == Split::kTrain && !out.empty())
      lengths_.mean_sequence = total_ / static_cast<double>(out.size());
    part.kept = static_cast<int64_t>(out.size());
    return out;
  }
  // Throws InputError if problems are too long that must not be, or if none is left of a part.
  DataLengths lengths() const {
    DataLengths out = lengths_;
    if (longest_.empty()) return out;
    std::string counts;
    for (const Part* part : {&train_, &held_out_})
      if (part->seen > 0)
        counts +=
            str(counts.empty() ? "" : " and ", part->too_long, " of ", part->seen, " ", part->kind);
    counts += " problems";
    const bool error = config_.data.too_long == TooLong::kError;
    if (error || train_.kept < std::min<int64_t>(1, train_.seen) ||
        held_out_.kept < std::min<int64_t>(1, held_out_.seen))
      throw InputError(str(longest_, "; ", counts, " are too long, this is the longest; hint: a ",
                           "larger model.context or ",
                           !error             ? "shorter problems"
                           : task_ != nullptr ? "smaller data.task_sizes"
                                              : "data.too_long: skip or truncate"));
    out.too_long = str(config_.data.too_long == TooLong::kSkip ? "left out " : "cut ", counts,
                       "; the longest: ", longest_);
    return out;
  }

 private:
  struct Part {
    const char* kind;
    int64_t seen = 0, too_long = 0, kept = 0;
  };

  // Whether the problem stays, which may be cut for it.
  bool fit(Example& example, Part& part) {
    const std::vector<int32_t> ids = encode_prompt(example, tokenizer_);
    auto prompt = static_cast<int64_t>(ids.size());
    if (prompt == 0) throw InputError("the prompt is empty");
    int64_t sequence = prompt;
    if (config_.trainer == TrainerType::kSft)
      sequence = static_cast<int64_t>(supervised_tokens(example, tokenizer_).size());
    if (prompt >= context_ || sequence > context_ + 1) {
      note_too_long(example, part, prompt, sequence);
      if (config_.data.too_long != TooLong::kTruncate || context_ < 2) return false;
      if (prompt >= context_) {
        const int64_t kept = context_ - completion_;
        sequence -= prompt - kept;
        prompt = kept;
        example.prompt =
            tokenizer_.decode(std::span(ids).last(static_cast<size_t>(kept)), SpecialText::kShow);
        example.special = SpecialTokens::kNone;
      }
      sequence = std::min(sequence, context_ + 1);
    }
    const int64_t shortest = lengths_.shortest_prompt;
    lengths_.shortest_prompt = shortest == 0 ? prompt : std::min(shortest, prompt);
    lengths_.longest_prompt = std::max(lengths_.longest_prompt, prompt);
    lengths_.longest_sequence = std::max(lengths_.longest_sequence, sequence);
    total_ += static_cast<double>(sequence);
    return true;
  }

  void note_too_long(const Example& example, Part& part, int64_t prompt, int64_t sequence) {
    ++part.too_long;
    if (sequence <= longest_size_) return;
    longest_size_ = sequence;
    const bool no_room = prompt >= context_;
    longest_ = str(place(example, part), ": ",
                   no_room ? "the prompt has " : "prompt, solution and end of sequence have ",
                   no_room ? prompt : sequence, " tokens, the model's context is ", context_,
                   no_room ? ": no room for a completion" : "");
  }

  // "FILE:12: 'the prompt'".
  std::string place(const Example& example, const Part& part) const {
    const JsonlConfig& jsonl = config_.data.jsonl;
    const bool own = &part == &held_out_ && !jsonl.eval_path.empty();
    return str(task_ != nullptr ? str(task_->name, ": ", part.kind, " example ", part.seen + 1, ",")
                                : str(own ? jsonl.eval_path : jsonl.path, ":", example.line, ":"),
               " ", excerpt(example.prompt));
  }

  const TrainConfig& config_;
  const Task* task_;
  const Tokenizer& tokenizer_;
  const int64_t context_, completion_;  // tokens: at most, and those a cut prompt leaves room for
  Part train_{.kind = "training"}, held_out_{.kind = "held-out"};
  DataLengths lengths_;
  double total_ = 0;     // tokens of all sequences that stay
  std::string longest_;  // of the problems that are too long
  int64_t longest_size_ = 0;
};

void keep_held_out(const TrainConfig& config, Dataset& data, ContextCheck& check) {
  data.held_out =
      check.take(Split::kHeldOut, static_cast<int64_t>(data.held_out.size()),
                 config.eval.size > 0 ? config.eval.size : data.held_out_size,
                 [&](int64_t i) { return std::move(data.held_out[static_cast<size_t>(i)]); });
}

[[noreturn]] void fail_nothing_to_train(const char* key) {
  throw InputError(str(key,
                       ": 1 holds everything out, which leaves nothing to train on; hint: a "
                       "smaller fraction; cohort eval takes 1"));
}

// What sampling asks for can be.
void check_sampling(const TrainConfig& config, const Dataset& data, int64_t shortest_prompt,
                    int64_t context) {
  check_stop_tokens(config.sampling, data.tokenizer->vocab_size());
  const int64_t length = config.sampling.max_completion_length, room = context - shortest_prompt;
  if (config.trainer == TrainerType::kGrpo && length > room)
    throw InputError(str(
        "max_completion_length: ", length, " tokens have room after no prompt: the shortest has ",
        shortest_prompt, ", the model's context is ", context,
        "; hint: max_completion_length=", room, " at most, or a larger model.context"));
}

// The tokens of documents one after the other. `end`: what follows each; none: nothing does.
std::vector<int32_t> encode_documents(const std::vector<std::string>& documents,
                                      const Tokenizer& tokenizer, std::optional<int32_t> end) {
  std::vector<std::vector<int32_t>> parts(documents.size());
  std::vector<std::string> faults(documents.size());
  parallel_for(static_cast<int64_t>(documents.size()), 1, [&](int64_t begin, int64_t last) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(last); ++i) try {
        parts[i] = tokenizer.encode(documents[i]);
      } catch (const std::exception& e) {
        faults[i] = e.what();
      }
  });
  std::vector<int32_t> tokens;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!faults[i].empty())
      throw InputError(documents.size() == 1 ? faults[i]
                                             : str("document ", i + 1, ": ", faults[i]));
    tokens.insert(tokens.end(), parts[i].begin(), parts[i].end());
    if (end) tokens.push_back(*end);
    parts[i] = {};
  }
  return tokens;
}

// `need_tokenizer`: makes one of a text if there is none.
void load_text(const DataConfig& data, Dataset& out,
               const std::function<void(const std::function<std::string()>&)>& need_tokenizer) {
  const TextCorpus corpus(text_files(data.text),
                          data.eval_text.empty() ? data.held_out_fraction : 0);
  std::optional<TextCorpus> evaluation;
  if (!data.eval_text.empty()) evaluation.emplace(text_files(data.eval_text), 0);
  const std::vector<std::string>& held_out = evaluation ? evaluation->train() : corpus.held_out();
  need_tokenizer([&] {
    std::string text;
    for (const auto* documents : {&corpus.train(), &held_out})
      for (const std::string& document : *documents) text += document;
    return text;
  });
  std::optional<int32_t> end;
  if (corpus.has_ends()) end = out.tokenizer->eos_id();
  out.train_tokens = encode_documents(corpus.train(), *out.tokenizer, end);
  out.held_out_tokens = encode_documents(held_out, *out.tokenizer, end);
}

}  // namespace

Dataset load_dataset(const TrainConfig& config, std::unique_ptr<Tokenizer> tokenizer) {
  const DataConfig& data = config.data;
  Dataset out;
  out.tokenizer = std::move(tokenizer);
  out.fingerprint = checked_fingerprint(data);
  if (out.tokenizer == nullptr && !data.tokenizer_path.empty())
    out.tokenizer = load_tokenizer(data.tokenizer_path);
  const auto need_tokenizer = [&](const auto& text) {
    if (out.tokenizer != nullptr) return;
    out.tokenizer = data.tokenizer == TokenizerType::kByte ? make_byte_tokenizer()
                                                           : make_char_tokenizer(text());
  };
  if (!data.text.empty()) {
    load_text(data, out, need_tokenizer);
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
    JsonlSplits splits = load_jsonl(data.jsonl);
    out.train = std::move(splits.train);
    held_out = std::move(splits.held_out);
    need_tokenizer([&] { return all_text(*out.train) + all_text(*held_out); });
  }
  if (data.is_chat()) {
    const auto format = chat_format(data, *out.tokenizer);
    const auto purpose =
        config.trainer == TrainerType::kSft ? ChatSet::Purpose::kTeach : ChatSet::Purpose::kAsk;
    out.train = std::make_unique<ChatSet>(std::move(out.train), format, data.system, purpose);
    held_out = std::make_unique<ChatSet>(std::move(held_out), format, data.system, purpose);
  }
  out.held_out_size = held_out->size();
  for (int64_t i = 0; i < out.held_out_size; ++i) out.held_out.push_back(held_out->get(i));
  return out;
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

DataLengths check_data(const TrainConfig& config, Dataset& data, int64_t context) {
  constexpr int64_t kOfEndless = 1000;
  if (config.trainer == TrainerType::kPretrain) {
    if (config.data.held_out_fraction == 1) fail_nothing_to_train("data.held_out_fraction");
    const auto tokens = static_cast<int64_t>(data.train_tokens.size());
    if (tokens <= context)
      throw InputError(str(config.data.text, ": the training part has ", tokens,
                           " tokens, a window needs ", context + 1,
                           "; hint: more text or a smaller model.context"));
    return {.longest_sequence = context + 1, .mean_sequence = static_cast<double>(context + 1)};
  }
  if (data.train->size() == 0) fail_nothing_to_train("data.jsonl.held_out_fraction");
  const int64_t n =
      data.task != nullptr ? std::min(kOfEndless, data.train->size()) : data.train->size();
  ContextCheck check(config, data, context);
  std::vector<Example> train =
      check.take(Split::kTrain, n, n, [&](int64_t i) { return data.train->get(i); });
  keep_held_out(config, data, check);
  DataLengths lengths = check.lengths();
  if (!lengths.too_long.empty()) data.train = make_example_set(std::move(train));
  check_sampling(config, data, lengths.shortest_prompt, context);
  return lengths;
}

std::string check_held_out(const TrainConfig& config, Dataset& data, int64_t context) {
  ContextCheck check(config, data, context);
  keep_held_out(config, data, check);
  return check.lengths().too_long;
}

void log_what_is_used(const TrainConfig& config, const Dataset& data, const std::string& too_long) {
  if (!too_long.empty()) logging::info("data.too_long: ", too_long);
  const auto n = static_cast<int64_t>(data.held_out.size());
  if (config.data.holds_nothing_out())
    logging::info("held_out_fraction: 0; nothing is held out, so nothing is evaluated");
  else if (config.trainer != TrainerType::kPretrain && n < config.eval.size)
    logging::info("eval.size: ", config.eval.size,
                  " held-out problems were asked for, the data have ", n);
  else if (n == config.eval.size && n < data.held_out_size)
    logging::info("eval.size: the first ", n, " of ", data.held_out_size,
                  " held-out problems; hint: eval.size=0 takes all");
}

}  // namespace cohort
