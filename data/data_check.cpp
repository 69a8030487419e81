#include "data/data_check.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "core/log.h"
#include "data/parallel_try.h"
#include "text/utf8.h"

namespace cohort {
namespace {

// Token counts of a problem, and its sort key for data.curriculum.
struct Measured {
  int64_t prompt = 0, sequence = 0;
  int64_t full_prompt = 0, full_sequence = 0;  // before truncation
  int64_t solution = 0;                        // with its end of sequence
  int64_t pair = 0;                            // (dpo) the prompt and both answers, packed
  float difficulty = 0;
  std::string error;  // empty: none
};

float difficulty_of(const Example& example, Curriculum curriculum, int64_t sequence) {
  if (curriculum != Curriculum::kPassRate) return static_cast<float>(sequence);
  const Json* rate = example.fields.find("pass_rate");
  if (rate == nullptr || !rate->is_number() || !(rate->as_double() >= 0 && rate->as_double() <= 1))
    throw InputError("data.curriculum: expected the field 'pass_rate', a number from 0 to 1");
  return static_cast<float>(1 - rate->as_double());
}

// Truncates problems to a model's context: texts lose their start, conversations the start of their
// earliest messages. Solutions that are too long are truncated by supervised_sequence().
struct ContextFit {
  TrainerType trainer = TrainerType::kSft;
  const Tokenizer& tokenizer;
  std::shared_ptr<const ChatRenderer> chat;  // null: no conversations
  int64_t context = 0, max_completion_length = 0;

  bool too_long(int64_t prompt, int64_t sequence) const {
    return (prompt >= context && !classifies()) || sequence > context + 1;
  }
  // Texts with a label are cut where they are encoded.
  bool classifies() const { return trainer == TrainerType::kClassify; }
  void truncate(Example& example) const {
    for (Example& rejected : example.rejected) truncate(rejected);
    if (classifies()) return;
    const std::vector<int32_t> ids = encode_prompt(example, tokenizer);
    const auto prompt = static_cast<int64_t>(ids.size());
    int64_t max_prompt = context - std::min(max_completion_length, context - 1);
    if (chat == nullptr) {
      if (prompt < context) return;
      example.prompt = tokenizer.decode(std::span(ids).last(static_cast<size_t>(max_prompt)),
                                        SpecialText::kShow);
      example.special = SpecialTokens::kNone;
      return;
    }
    int64_t sequence = prompt;
    if (trainer == TrainerType::kSft) {
      // The last answer stays whole if half of the context is enough for it.
      sequence = static_cast<int64_t>(supervised_tokens(example, tokenizer).size());
      max_prompt = std::max(context / 2, context + 1 - (sequence - prompt));
    }
    if (too_long(prompt, sequence)) chat->truncate(example, std::min(max_prompt, context - 1));
  }
};

// Checks problems against a model's context, and truncates or skips those that are too long.
class ContextCheck {
 public:
  ContextCheck(const DataSections& config, const Dataset& data, int64_t context, ContextLimit limit)
      : config_(config),
        task_(data.task),
        limit_(limit),
        fit_{config.batch.trainer, *data.tokenizer, data.chat, context,
             config.max_completion_length} {}

  // Checks the problems in `order` and returns those that are kept, at most `limit`.
  std::vector<int64_t> keep(Split split, const ExampleSet& set, std::span<const int64_t> order,
                            int64_t limit) {
    constexpr size_t kBlock = 1024;
    Part& part = split == Split::kTrain ? train_ : held_out_;
    std::vector<int64_t> kept;
    for (size_t begin = 0; begin < order.size(); begin += kBlock) {
      const auto indices = order.subspan(begin, std::min(kBlock, order.size() - begin));
      const std::vector<Measured> block = measure(set, indices, part);
      for (size_t i = 0; i < indices.size(); ++i, ++part.seen) {
        if (static_cast<int64_t>(kept.size()) == limit) return kept;
        if (!block[i].error.empty()) throw InputError(block[i].error);
        if (!fits(block[i], part, set, indices[i])) continue;
        kept.push_back(indices[i]);
        ++part.kept;
        if (split == Split::kTrain) difficulty_.push_back(block[i].difficulty);
      }
    }
    return kept;
  }
  const ContextFit& fit() const { return fit_; }
  std::vector<float> take_difficulty() { return std::move(difficulty_); }

  // Throws InputError if problems are too long and too_long is kError, or if a split is empty.
  DataLengths lengths() const {
    DataLengths out = lengths_;
    if (train_.kept > 0) out.mean_sequence = train_.total / static_cast<double>(train_.kept);
    add_notes(out.notes);
    if (longest_.empty()) return out;
    const std::string counts = counts_text(&Part::too_long, &Part::seen);
    const bool error = config_.data.too_long == TooLong::kError && !fit_.classifies();
    if (error || train_.kept < std::min<int64_t>(1, train_.seen) ||
        held_out_.kept < std::min<int64_t>(1, held_out_.seen))
      throw InputError(
          str(longest_, "; ", counts, " are too long, this is the longest",
              context_hint(limit_, !error             ? "shorter problems"
                                   : task_ != nullptr ? "smaller data.task_sizes"
                                                      : "data.too_long: skip or truncate")));
    out.too_long = str(config_.data.too_long == TooLong::kSkip ? "skipped " : "truncated ", counts,
                       "; the longest: ", longest_);
    return out;
  }

 private:
  struct Part {
    const char* kind;
    int64_t seen = 0, too_long = 0, kept = 0;
    int64_t long_prompts = 0;    // prompts that leave fewer tokens than max_completion_length
    int64_t long_solutions = 0;  // longer than max_completion_length
    double total = 0;            // tokens of all kept sequences
  };

  // "3 of 23 training and 1 of 2 held-out problems".
  std::string counts_text(int64_t Part::*count, int64_t Part::*all) const {
    std::string text;
    for (const Part* part : {&train_, &held_out_})
      if (part->seen > 0)
        text += str(text.empty() ? "" : " and ", part->*count, " of ", part->*all, " ", part->kind);
    return text + " problems";
  }

  void add_notes(std::vector<std::string>& notes) const {
    if (const std::string& format = config_.data.jsonl.detected; !format.empty())
      notes.push_back(format);
    const int64_t length = config_.max_completion_length;
    if (train_.long_prompts + held_out_.long_prompts > 0)
      notes.push_back(str("max_completion_length: the prompts of ",
                          counts_text(&Part::long_prompts, &Part::kept), " leave fewer than ",
                          length, " tokens in the context of ", fit_.context,
                          ", the longest leaves ", fit_.context - lengths_.longest_prompt,
                          context_hint(limit_, "shorter prompts")));
    if (train_.long_solutions + held_out_.long_solutions > 0)
      notes.push_back(
          str("max_completion_length: the solutions of ",
              counts_text(&Part::long_solutions, &Part::kept), " have more than ", length,
              " tokens, the longest ", longest_solution_,
              ": a completion of that length is truncated; hint: max_completion_length=",
              longest_solution_));
    if (fit_.chat == nullptr) return;
    if (fit_.chat->has_own_system())
      notes.push_back("data.system: conversations that have a system message keep it");
    const auto end = chat_format(config_.data, fit_.tokenizer).end_of_turn(fit_.tokenizer);
    if (!end.token)
      notes.push_back(str("chat template: no special token ends the assistant's turns; ",
                          end.text.empty()
                              ? std::string("only the end of sequence does")
                              : "the text " + excerpt(end.text) + " is a stop string instead"));
  }

  std::vector<Measured> measure(const ExampleSet& set, std::span<const int64_t> indices,
                                const Part& part) const {
    std::vector<Measured> out(indices.size());
    parallel_try(std::ssize(indices), 16, [&](int64_t i) {
      Measured& measured = out[static_cast<size_t>(i)];
      const int64_t index = indices[static_cast<size_t>(i)];
      try {
        measure(set.get(index), index, part, measured);
      } catch (const std::exception& e) {
        measured.error = e.what();
      }
    });
    return out;
  }
  void measure(Example example, int64_t index, const Part& part, Measured& out) const {
    try {
      measure_tokens(example, out);
      out.full_prompt = out.prompt;
      out.full_sequence = out.sequence;
      if (config_.data.is_sorted() && &part == &train_)
        out.difficulty = difficulty_of(example, config_.data.curriculum, out.sequence);
      if (!truncates() || !fit_.too_long(out.prompt, out.sequence)) return;
      fit_.truncate(example);
      measure_tokens(example, out, true);
      if (fit_.too_long(out.prompt, 0))
        throw InputError(str("the truncated prompt still has ", out.prompt,
                             " tokens, the model's context is ", fit_.context,
                             context_hint(limit_, "data.too_long: skip")));
    } catch (const InputError& e) {
      throw InputError(str(location(example, index, part), ": ", e.what()));
    }
  }
  void measure_tokens(const Example& example, Measured& out, bool is_truncated = false) const {
    if (example.images != nullptr) {
      out.prompt = fit_.context;
      out.sequence = out.prompt + 1;
      return;
    }
    if (fit_.classifies()) {
      out.prompt = std::ssize(fit_.tokenizer.encode_texts(example.prompt, example.pair).ids);
      if (out.prompt == 0) throw InputError("the text is empty");
      if (truncates() && out.prompt > fit_.context)  // throws if that leaves nothing of the text
        fit_.tokenizer.encode_texts(example.prompt, example.pair, fit_.context);
      out.sequence = out.prompt + 1;  // with its label
      return;
    }
    out.prompt = static_cast<int64_t>(encode_prompt(example, fit_.tokenizer).size());
    if (out.prompt == 0) throw InputError("the prompt is empty");
    out.sequence = out.prompt;
    if (config_.batch.trainer == TrainerType::kDpo) return measure_pair(example, out, is_truncated);
    if (config_.batch.trainer != TrainerType::kSft) {
      out.solution = solution_length(example);
      return;
    }
    out.sequence = static_cast<int64_t>(supervised_tokens(example, fit_.tokenizer).size());
    out.solution = out.sequence - out.prompt;
    if (!has_targets(example, out))
      throw InputError("it has no target tokens; hint: a conversation needs an answer");
  }
  // The prompt and its length are those of the chosen answer.
  void measure_pair(const Example& example, Measured& out, bool is_truncated) const {
    const std::vector<int32_t> chosen = supervised_tokens(example, fit_.tokenizer),
                               rejected = supervised_tokens(example.rejected.at(0), fit_.tokenizer);
    const int64_t most = fit_.context + 1, a = std::ssize(chosen), b = std::ssize(rejected);
    const auto first = [&](const std::vector<int32_t>& tokens) {
      return std::span(tokens).first(static_cast<size_t>(std::min(std::ssize(tokens), most)));
    };
    if (chosen == rejected || (is_truncated && std::ranges::equal(first(chosen), first(rejected))))
      throw InputError(str("the chosen and the rejected answer have the same tokens",
                           chosen == rejected ? "" : " in the context", "; hint: remove it"));
    out.sequence = std::max(a, b);
    out.solution = out.sequence - out.prompt;
    out.pair = std::min(a, most) + std::min(b, most) - std::min(out.prompt, most);
    for (const Example* each : {&example, &example.rejected[0]})
      if (!has_targets(*each, out))
        throw InputError("an answer has no target tokens; hint: conversations need an answer");
  }
  // True if a problem has target tokens, or will not be used unchanged.
  bool has_targets(const Example& example, const Measured& size) const {
    if (!fit_.too_long(size.prompt, size.sequence))
      return example.loss_spans.empty() ||
             std::ranges::any_of(example.loss_spans, [](auto& s) { return s.first < s.second; });
    if (!truncates() || size.prompt >= fit_.context) return true;  // skipped, or truncated first
    return supervised_sequence(example, fit_.tokenizer, fit_.context, TooLong::kTruncate)
               .num_targets() > 0;
  }
  // Tokens including the end of sequence; 0: no solution, or one that the tokenizer cannot encode.
  int64_t solution_length(const Example& example) const {
    try {
      const size_t tokens = fit_.tokenizer.encode(example.solution).size();
      return tokens == 0 ? 0 : static_cast<int64_t>(tokens) + 1;
    } catch (const InputError&) {
      return 0;
    }
  }
  bool truncates() const {
    if (fit_.classifies()) return config_.data.too_long != TooLong::kSkip;
    return config_.data.too_long == TooLong::kTruncate && fit_.context >= 2;
  }

  // Returns true if a problem is kept, possibly truncated, and updates the statistics.
  bool fits(const Measured& size, Part& part, const ExampleSet& set, int64_t index) {
    if (fit_.too_long(size.full_prompt, size.full_sequence)) {
      ++part.too_long;
      if (size.full_sequence > longest_size_) record_longest(size, set.get(index), index, part);
      if (!truncates()) return false;
    }
    const int64_t sequence = size.pair > 0 ? size.pair : std::min(size.sequence, fit_.context + 1),
                  length = config_.max_completion_length;
    const int64_t shortest = lengths_.shortest_prompt;
    lengths_.shortest_prompt = shortest == 0 ? size.prompt : std::min(shortest, size.prompt);
    lengths_.longest_prompt = std::max(lengths_.longest_prompt, size.prompt);
    lengths_.longest_sequence = std::max(lengths_.longest_sequence, sequence);
    part.total += static_cast<double>(sequence);
    if (fit_.classifies() || size.pair > 0) return true;  // nothing is sampled
    part.long_prompts += fit_.context - size.prompt < length;
    part.long_solutions += size.solution > length;
    if (size.solution > length) longest_solution_ = std::max(longest_solution_, size.solution);
    return true;
  }

  void record_longest(const Measured& size, const Example& example, int64_t index,
                      const Part& part) {
    longest_size_ = size.full_sequence;
    if (fit_.classifies()) {
      longest_ = str(location(example, index, part), ": the text has ", size.full_prompt,
                     " tokens, the model's context is ", fit_.context);
      return;
    }
    const bool long_prompt = size.full_prompt >= fit_.context;
    longest_ =
        str(location(example, index, part), ": ",
            long_prompt ? "the prompt has " : "prompt, solution and end of sequence have ",
            long_prompt ? size.full_prompt : size.full_sequence, " tokens, the model's context is ",
            fit_.context, long_prompt ? ", which leaves none for a completion" : "");
  }

  // "FILE:12: 'the prompt'".
  std::string location(const Example& example, int64_t index, const Part& part) const {
    return str(task_ != nullptr ? str(task_->name, ": ", part.kind, " example ", index + 1, ",")
                                : example.where + ":",
               " ", excerpt(example.prompt));
  }

  const DataSections& config_;
  const Task* task_;
  const ContextLimit limit_;
  const ContextFit fit_;
  Part train_{.kind = "training"}, held_out_{.kind = "held-out"};
  DataLengths lengths_;
  std::vector<float> difficulty_;  // sort keys of the kept training problems
  std::string longest_;            // message on the longest problem that is too long
  int64_t longest_size_ = 0, longest_solution_ = 0;
};

std::vector<int64_t> first_indices(int64_t count) {
  std::vector<int64_t> out(static_cast<size_t>(count));
  std::iota(out.begin(), out.end(), int64_t{0});
  return out;
}

// Keeps the problems with the smallest hashes: a sample that does not depend on the files' order.
void keep_held_out(const DataSections& config, Dataset& data, ContextCheck& check) {
  const ExampleSet& set = *data.held_out_set;
  const int64_t size = set.size();
  std::vector<int64_t> order = first_indices(size);
  if (data.task == nullptr && config.eval_size > 0) {
    std::vector<uint64_t> hashes;
    for (const int64_t i : order) hashes.push_back(set.id(i).split);
    std::ranges::stable_sort(order, {}, [&](int64_t i) { return hashes[static_cast<size_t>(i)]; });
  }
  std::vector<int64_t> kept =
      check.keep(Split::kHeldOut, set, order, config.eval_size > 0 ? config.eval_size : size);
  std::sort(kept.begin(), kept.end());
  data.held_out.clear();
  for (const int64_t i : kept) {
    data.held_out.push_back(set.get(i));
    check.fit().truncate(data.held_out.back());
  }
}

[[noreturn]] void fail_nothing_to_train() {
  throw InputError(
      "data.held_out_fraction: 1 holds everything out and leaves nothing to train on; hint: a "
      "smaller fraction; cohort eval takes 1");
}

// Counts the kept problems of each entry of data.jsonl.path.
void count_sources(const DataSections& config, Dataset& data, const std::vector<int64_t>& kept) {
  auto first = kept.begin();
  int64_t end = 0;
  for (size_t i = 0; i < data.source_sizes.size(); ++i) {
    const auto last = std::lower_bound(first, kept.end(), end += data.source_sizes[i]);
    data.source_sizes[i] = last - first;
    if (first == last && !config.data.weights.empty())
      throw InputError(str(config.data.jsonl.path[i],
                           ": has no problem to train on, but a weight in data.weights; hint: "
                           "remove it"));
    first = last;
  }
}

}  // namespace

DataLengths check_data(const DataSections& config, Dataset& data, int64_t context,
                       ContextLimit limit) {
  constexpr int64_t kCheckedOfEndless = 1000;
  if (reads_text(config.batch.trainer)) {
    const int64_t window = window_length(config.batch.trainer, *data.tokenizer, context);
    if (config.data.eval_text.empty() && config.data.jsonl.held_out() == 1) fail_nothing_to_train();
    for (size_t i = 0; i < data.train_text.size(); ++i)
      if (const int64_t tokens = data.train_text[i].size(); tokens < window)
        throw InputError(str(config.data.text[i], ": the training part has ", tokens,
                             " tokens, a window needs ", window,
                             "; hint: more text or a smaller model.context"));
    return {.longest_sequence = context + 1, .mean_sequence = static_cast<double>(context + 1)};
  }
  if (data.train->size() == 0) fail_nothing_to_train();
  const int64_t all = data.train->size();
  const int64_t n = data.task != nullptr ? std::min(kCheckedOfEndless, all) : all;
  ContextCheck check(config, data, context, limit);
  std::vector<int64_t> kept = check.keep(Split::kTrain, *data.train, first_indices(n), n);
  keep_held_out(config, data, check);
  DataLengths lengths = check.lengths();
  if (config.data.is_sorted()) data.difficulty = check.take_difficulty();
  count_sources(config, data, kept);
  if (!lengths.too_long.empty())
    data.train = make_changed_set(
        std::move(data.train), [fit = check.fit()](Example& example) { fit.truncate(example); },
        std::move(kept));
  const int64_t wanted = config.batch.examples_per_step(), size = data.train->size();
  if (data.task == nullptr && wanted > size)
    lengths.notes.push_back(
        str(config.batch.trainer == TrainerType::kGrpo ? "prompts_per_step" : "batch_size", ": ",
            wanted, ", and there are ", size, " training problems: a step repeats some of them"));
  return lengths;
}

DataLengths check_held_out(const DataSections& config, Dataset& data, int64_t context,
                           ContextLimit limit) {
  ContextCheck check(config, data, context, limit);
  keep_held_out(config, data, check);
  return check.lengths();
}

std::string context_hint(ContextLimit limit, const std::string& otherwise) {
  return limit == ContextLimit::kMayGrow
             ? "; hint: a larger model.context or " + otherwise
             : str("; hint: ", otherwise, "; the model has no larger context");
}

std::string held_out_leak(const Dataset& data, const std::vector<DataSections>& earlier) {
  if (data.task != nullptr || data.held_out_set == nullptr || data.held_out_set->size() == 0 ||
      data.held_out_set->get(0).images != nullptr)
    return "";
  const ExampleSet& held_out = *data.held_out_set;
  std::vector<std::pair<uint64_t, int64_t>> known;  // hashes, sorted, with their problems
  for (int64_t i = 0; i < held_out.size(); ++i) {
    const ExampleId id = held_out.id(i);
    known.emplace_back(id.split, i);
    if (id.content != 0) known.emplace_back(id.content, i);
  }
  std::sort(known.begin(), known.end());
  // "data: 12 of the 40 held-out problems are WHERE, the first: FILE:3; hint: HINT"; empty: there
  // are none.
  const auto leak = [&](const ExampleSet& trained, const std::string& where,
                        const char* hint) -> std::string {
    std::set<int64_t> leaked;
    for (int64_t i = 0; i < trained.size(); ++i) {
      const ExampleId id = trained.id(i);
      for (const uint64_t hash : {id.split, id.content})
        for (auto it = std::lower_bound(known.begin(), known.end(), std::pair(hash, int64_t{0}));
             it != known.end() && it->first == hash; ++it)
          leaked.insert(it->second);
    }
    if (leaked.empty()) return "";
    return str("data: ", leaked.size(), " of the ", held_out.size(), " held-out problems are ",
               where, ", the first: ", held_out.get(*leaked.begin()).where, "; hint: ", hint);
  };
  std::string text = leak(*data.train, "also trained on",
                          "problems of data.jsonl.eval_path that data.jsonl.path does not have");
  for (size_t i = 0; i < earlier.size() && text.empty(); ++i) {
    if (earlier[i].data.jsonl.path.empty()) continue;
    std::unique_ptr<ExampleSet> trained;
    try {
      trained = load_jsonl(earlier[i].data.jsonl).train;
    } catch (const InputError&) {
      continue;
    }
    text =
        leak(*trained,
             str("trained on by stage ", i + 1, " (", trainer_name(earlier[i].batch.trainer), ")"),
             "one data.split_by and one held_out_fraction for all stages");
  }
  return text;
}

void log_data_usage(const DataSections& config, const Dataset& data, const DataLengths& lengths) {
  if (!lengths.too_long.empty()) logging::info("data.too_long: ", lengths.too_long);
  for (const std::string& note : lengths.notes) logging::info(note);
  const auto n = static_cast<int64_t>(data.held_out.size());
  if (config.data.holds_nothing_out()) {
    logging::info("data.held_out_fraction: 0; nothing of the data is held out for evaluations");
  } else if (reads_text(config.batch.trainer)) {
    const int64_t tokens = data.held_out_text.size();
    if (config.eval_tokens > 0 && tokens > config.eval_tokens)
      logging::info("eval.tokens: ", config.eval_tokens, " of ", tokens,
                    " held-out tokens; hint: eval.tokens=0 takes all");
  } else if (n < config.eval_size) {
    logging::info("eval.size: ", config.eval_size,
                  " held-out problems were asked for, the data have ", n);
  } else if (n == config.eval_size && n < data.held_out_set->size()) {
    logging::info(
        "eval.size: ", n, " of ", data.held_out_set->size(),
        " held-out problems, those with the smallest hashes; hint: eval.size=0 takes all");
  }
}

}  // namespace cohort
