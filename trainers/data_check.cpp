#include "trainers/data_check.h"

#include <algorithm>
#include <vector>

#include "core/log.h"
#include "core/parallel.h"
#include "data/utf8.h"

namespace cohort {
namespace {

// What a problem takes of the context, in tokens, and where data.curriculum has it.
struct Measured {
  int64_t prompt = 0, sequence = 0;
  float difficulty = 0;
  std::string fault;  // what is wrong with it; empty: nothing
};

float difficulty_of(const Example& example, Curriculum curriculum, int64_t sequence) {
  if (curriculum != Curriculum::kPassRate) return static_cast<float>(sequence);
  const Json* rate = example.fields.find("pass_rate");
  if (rate == nullptr || !rate->is_number() || !(rate->as_double() >= 0 && rate->as_double() <= 1))
    throw InputError("data.curriculum: expected the field 'pass_rate', a number from 0 to 1");
  return static_cast<float>(1 - rate->as_double());
}

// How long a prompt may be, and what is kept of one that is longer.
struct PromptRoom {
  int64_t context, kept;
};

// Takes the start away of a prompt that leaves no room for a completion.
void cut_prompt(Example& example, const Tokenizer& tokenizer, PromptRoom room) {
  const std::vector<int32_t> ids = encode_prompt(example, tokenizer);
  if (static_cast<int64_t>(ids.size()) < room.context) return;
  example.prompt =
      tokenizer.decode(std::span(ids).last(static_cast<size_t>(room.kept)), SpecialText::kShow);
  example.special = SpecialTokens::kNone;
}

// The problems of a set that stay.
class FittedSet final : public ExampleSet {
 public:
  FittedSet(std::unique_ptr<ExampleSet> all, std::vector<int64_t> kept, const Tokenizer& tokenizer,
            PromptRoom room)
      : all_(std::move(all)), kept_(std::move(kept)), tokenizer_(tokenizer), room_(room) {}

  int64_t size() const override { return static_cast<int64_t>(kept_.size()); }
  Example get(int64_t index) const override {
    Example example = all_->get(kept_.at(static_cast<size_t>(index)));
    cut_prompt(example, tokenizer_, room_);
    return example;
  }

 private:
  std::unique_ptr<ExampleSet> all_;
  std::vector<int64_t> kept_;
  const Tokenizer& tokenizer_;
  PromptRoom room_;
};

// Checks problems against a model's context, and cuts or leaves out those that are too long.
class ContextCheck {
 public:
  ContextCheck(const TrainConfig& config, const Dataset& data, int64_t context)
      : config_(config), task_(data.task), tokenizer_(*data.tokenizer), context_(context) {
    kept_prompt_ = context - std::min(config.sampling.max_completion_length, context - 1);
  }

  // Which of the first `size` problems of a set stay, at most `limit`.
  std::vector<int64_t> keep(Split split, const ExampleSet& set, int64_t size, int64_t limit) {
    constexpr int64_t kBlock = 1024;
    Part& part = split == Split::kTrain ? train_ : held_out_;
    std::vector<int64_t> kept;
    for (int64_t begin = 0; begin < size; begin += kBlock) {
      const int64_t end = std::min(size, begin + kBlock);
      const std::vector<Measured> block = measure(set, begin, end, part);
      for (int64_t i = begin; i < end; ++i, ++part.seen) {
        if (static_cast<int64_t>(kept.size()) == limit) return kept;
        const Measured& measured = block[static_cast<size_t>(i - begin)];
        if (!measured.fault.empty()) throw InputError(measured.fault);
        if (!fit(measured, part, set, i)) continue;
        kept.push_back(i);
        ++part.kept;
        if (split == Split::kTrain) difficulty_.push_back(measured.difficulty);
      }
    }
    return kept;
  }
  PromptRoom room() const { return {context_, kept_prompt_}; }
  std::vector<float> take_difficulty() { return std::move(difficulty_); }

  // Throws InputError if problems are too long that must not be, or if none is left of a part.
  DataLengths lengths() const {
    DataLengths out = lengths_;
    if (train_.kept > 0) out.mean_sequence = train_.total / static_cast<double>(train_.kept);
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
    double total = 0;  // tokens of all sequences that stay
  };

  std::vector<Measured> measure(const ExampleSet& set, int64_t begin, int64_t end,
                                const Part& part) const {
    std::vector<Measured> out(static_cast<size_t>(end - begin));
    parallel_for(end - begin, 16, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        Measured& measured = out[static_cast<size_t>(i)];
        try {
          measure(set.get(begin + i), begin + i, part, measured);
        } catch (const std::exception& e) {
          measured.fault = e.what();
        }
      }
    });
    return out;
  }
  void measure(const Example& example, int64_t index, const Part& part, Measured& out) const {
    try {
      out.prompt = static_cast<int64_t>(encode_prompt(example, tokenizer_).size());
      if (out.prompt == 0) throw InputError("the prompt is empty");
      out.sequence = out.prompt;
      if (config_.trainer == TrainerType::kSft)
        out.sequence = static_cast<int64_t>(supervised_tokens(example, tokenizer_).size());
      if (config_.data.curriculum != Curriculum::kNone && &part == &train_)
        out.difficulty = difficulty_of(example, config_.data.curriculum, out.sequence);
    } catch (const InputError& e) {
      throw InputError(str(place(example, index, part), ": ", e.what()));
    }
  }

  // Whether a problem stays, which may be cut for it.
  bool fit(Measured size, Part& part, const ExampleSet& set, int64_t index) {
    if (size.prompt >= context_ || size.sequence > context_ + 1) {
      ++part.too_long;
      if (size.sequence > longest_size_) note_longest(size, set.get(index), index, part);
      if (config_.data.too_long != TooLong::kTruncate || context_ < 2) return false;
      if (size.prompt >= context_) {
        size.sequence -= size.prompt - kept_prompt_;
        size.prompt = kept_prompt_;
      }
      size.sequence = std::min(size.sequence, context_ + 1);
    }
    const int64_t shortest = lengths_.shortest_prompt;
    lengths_.shortest_prompt = shortest == 0 ? size.prompt : std::min(shortest, size.prompt);
    lengths_.longest_prompt = std::max(lengths_.longest_prompt, size.prompt);
    lengths_.longest_sequence = std::max(lengths_.longest_sequence, size.sequence);
    part.total += static_cast<double>(size.sequence);
    return true;
  }

  void note_longest(const Measured& size, const Example& example, int64_t index, const Part& part) {
    longest_size_ = size.sequence;
    const bool no_room = size.prompt >= context_;
    longest_ = str(place(example, index, part), ": ",
                   no_room ? "the prompt has " : "prompt, solution and end of sequence have ",
                   no_room ? size.prompt : size.sequence, " tokens, the model's context is ",
                   context_, no_room ? ": no room for a completion" : "");
  }

  // "FILE:12: 'the prompt'".
  std::string place(const Example& example, int64_t index, const Part& part) const {
    return str(task_ != nullptr ? str(task_->name, ": ", part.kind, " example ", index + 1, ",")
                                : example.where + ":",
               " ", excerpt(example.prompt));
  }

  const TrainConfig& config_;
  const Task* task_;
  const Tokenizer& tokenizer_;
  const int64_t context_;
  int64_t kept_prompt_;  // tokens of one that is cut: a completion has room after them
  Part train_{.kind = "training"}, held_out_{.kind = "held-out"};
  DataLengths lengths_;
  std::vector<float> difficulty_;  // of the training problems that stay
  std::string longest_;            // of the problems that are too long
  int64_t longest_size_ = 0;
};

void keep_held_out(const TrainConfig& config, Dataset& data, ContextCheck& check) {
  const int64_t size = data.held_out_set->size();
  const std::vector<int64_t> kept = check.keep(Split::kHeldOut, *data.held_out_set, size,
                                               config.eval.size > 0 ? config.eval.size : size);
  data.held_out.clear();
  for (const int64_t i : kept) {
    data.held_out.push_back(data.held_out_set->get(i));
    cut_prompt(data.held_out.back(), *data.tokenizer, check.room());
  }
}

[[noreturn]] void fail_nothing_to_train(const char* key) {
  throw InputError(str(key,
                       ": 1 holds everything out, which leaves nothing to train on; hint: a "
                       "smaller fraction; cohort eval takes 1"));
}

// What sampling asks for can be.
void check_sampling(const TrainConfig& config, const Dataset& data, int64_t shortest_prompt,
                    int64_t context) {
  check_sampling_tokens(config.sampling, data.tokenizer->vocab_size());
  const int64_t length = config.sampling.max_completion_length, room = context - shortest_prompt;
  if (config.trainer == TrainerType::kGrpo && length > room)
    throw InputError(str(
        "max_completion_length: ", length, " tokens have room after no prompt: the shortest has ",
        shortest_prompt, ", the model's context is ", context,
        "; hint: max_completion_length=", room, " at most, or a larger model.context"));
}

// How many problems of each entry of data.jsonl.path stay.
void count_sources(const TrainConfig& config, Dataset& data, const std::vector<int64_t>& kept) {
  auto first = kept.begin();
  int64_t end = 0;
  for (size_t i = 0; i < data.source_sizes.size(); ++i) {
    const auto last = std::lower_bound(first, kept.end(), end += data.source_sizes[i]);
    data.source_sizes[i] = last - first;
    if (first == last && !config.data.weights.empty())
      throw InputError(str(config.data.jsonl.path[i],
                           ": has no problem to train on, and a share in data.weights; hint: "
                           "leave it out"));
    first = last;
  }
}

}  // namespace

DataLengths check_data(const TrainConfig& config, Dataset& data, int64_t context) {
  constexpr int64_t kOfEndless = 1000;
  if (config.trainer == TrainerType::kPretrain) {
    if (config.data.held_out_fraction == 1) fail_nothing_to_train("data.held_out_fraction");
    for (size_t i = 0; i < data.train_text.size(); ++i)
      if (const int64_t tokens = data.train_text[i].size(); tokens <= context)
        throw InputError(str(config.data.text[i], ": the training part has ", tokens,
                             " tokens, a window needs ", context + 1,
                             "; hint: more text or a smaller model.context"));
    return {.longest_sequence = context + 1, .mean_sequence = static_cast<double>(context + 1)};
  }
  if (data.train->size() == 0) fail_nothing_to_train("data.jsonl.held_out_fraction");
  const int64_t all = data.train->size();
  const int64_t n = data.task != nullptr ? std::min(kOfEndless, all) : all;
  ContextCheck check(config, data, context);
  std::vector<int64_t> kept = check.keep(Split::kTrain, *data.train, n, n);
  keep_held_out(config, data, check);
  DataLengths lengths = check.lengths();
  if (config.data.curriculum != Curriculum::kNone) data.difficulty = check.take_difficulty();
  count_sources(config, data, kept);
  if (!lengths.too_long.empty())
    data.train = std::make_unique<FittedSet>(std::move(data.train), std::move(kept),
                                             *data.tokenizer, check.room());
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
  if (config.data.holds_nothing_out()) {
    logging::info("held_out_fraction: 0; nothing is held out, so nothing is evaluated");
  } else if (config.trainer == TrainerType::kPretrain) {
    const int64_t tokens = data.held_out_text.size();
    if (config.eval.tokens > 0 && tokens > config.eval.tokens)
      logging::info("eval.tokens: ", config.eval.tokens, " of ", tokens,
                    " held-out tokens; hint: eval.tokens=0 takes all");
  } else if (n < config.eval.size) {
    logging::info("eval.size: ", config.eval.size,
                  " held-out problems were asked for, the data have ", n);
  } else if (n == config.eval.size && n < data.held_out_set->size()) {
    logging::info("eval.size: the first ", n, " of ", data.held_out_set->size(),
                  " held-out problems; hint: eval.size=0 takes all");
  }
}

}  // namespace cohort
