// Each step passes its pieces to the next one, so that no list of words is stored.
#include "text/tokenizers/pre_tokenizer.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "text/tokenizers/byte_level.h"
#include "text/tokenizers/json_fields.h"
#include "text/tokenizers/pattern.h"
#include "text/tokenizers/splitters.h"
#include "text/unicode.h"
#include "text/utf8.h"

namespace cohort {
namespace {

using PreTokenizerPtr = std::unique_ptr<PreTokenizer>;
using Steps = std::vector<PreTokenizerPtr>;

// Treatment of the matches of a pattern.
enum class Behavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };

Behavior behavior_of(const std::string& name) {
  constexpr std::pair<const char*, Behavior> kNames[] = {
      {"Removed", Behavior::kRemoved},
      {"Isolated", Behavior::kIsolated},
      {"MergedWithPrevious", Behavior::kMergedWithPrevious},
      {"MergedWithNext", Behavior::kMergedWithNext},
      {"Contiguous", Behavior::kContiguous}};
  for (const auto& [known, behavior] : kNames)
    if (name == known) return behavior;
  throw InputError(str("unknown behavior '", name, "'; known: Removed, Isolated, ",
                       "MergedWithPrevious, MergedWithNext, Contiguous"));
}

// Takes the matches of a text and the parts between them in order, and outputs pieces merged by a
// behaviour.
class PieceMerger {
 public:
  PieceMerger(Piece piece, Behavior behavior, const PieceSink& sink)
      : piece_(piece), behavior_(behavior), sink_(sink) {}

  void add(size_t begin, size_t end, bool match) {
    bool merges = false;
    switch (behavior_) {
      case Behavior::kRemoved:
      case Behavior::kIsolated:
        break;
      case Behavior::kMergedWithPrevious:
        merges = match && !last_match_;
        break;
      case Behavior::kMergedWithNext:
        merges = !match && last_match_;
        break;
      case Behavior::kContiguous:
        merges = match == last_match_;
        break;
    }
    last_match_ = match;
    if (!merges || !held_) flush(begin);
    if (behavior_ == Behavior::kRemoved && match) {
      begin_ = end_ = end;
      held_ = false;
      return;
    }
    end_ = end;
    held_ = true;
  }
  void finish() { flush(end_); }

 private:
  void flush(size_t next) {
    if (held_ && end_ > begin_)
      sink_({piece_.text.substr(begin_, end_ - begin_), piece_.starts_text && begin_ == 0});
    begin_ = end_ = next;
    held_ = false;
  }

  Piece piece_;
  Behavior behavior_;
  const PieceSink& sink_;
  size_t begin_ = 0, end_ = 0;
  bool held_ = false, last_match_ = false;
};

class Split final : public PreTokenizer {
 public:
  enum class Invert { kNo, kYes };
  Split(Pattern pattern, Behavior behavior, Invert invert)
      : pattern_(std::move(pattern)), behavior_(behavior), invert_(invert == Invert::kYes) {}

  void split(Piece piece, Work& work, const PieceSink& sink) const override {
    PieceMerger merger(piece, behavior_, sink);
    size_t from = 0;
    pattern_.find_all(piece.text, work, [&](size_t begin, size_t end) {
      if (begin > from) merger.add(from, begin, invert_);
      merger.add(begin, end, !invert_);
      from = end;
    });
    if (from < piece.text.size()) merger.add(from, piece.text.size(), invert_);
    merger.finish();
  }

 private:
  Pattern pattern_;
  Behavior behavior_;
  bool invert_;
};

// A pattern with a hand-written splitter, whose matches cover the text.
class KnownSplit final : public PreTokenizer {
 public:
  explicit KnownSplit(Splitter splitter) : splitter_(splitter) {}
  void split(Piece piece, Work&, const PieceSink& sink) const override {
    for (size_t at = 0; at < piece.text.size();) {
      const size_t end = splitter_(piece.text, at);
      sink({piece.text.substr(at, end - at), piece.starts_text && at == 0});
      at = end;
    }
  }

 private:
  Splitter splitter_;
};

// Splits with the characters that satisfy a predicate as matches.
class CharacterSplit final : public PreTokenizer {
 public:
  using Predicate = std::function<bool(char32_t)>;
  CharacterSplit(Predicate is_match, Behavior behavior)
      : is_match_(std::move(is_match)), behavior_(behavior) {}

  void split(Piece piece, Work&, const PieceSink& sink) const override {
    PieceMerger merger(piece, behavior_, sink);
    size_t from = 0;
    for (size_t at = 0; at < piece.text.size();) {
      const Utf8Char c = decode_utf8(piece.text, at);
      COHORT_CHECK(c.size > 0, "[pre_tokenizer] byte ", at, " is not UTF-8");
      if (is_match_(c.code)) {
        if (at > from) merger.add(from, at, false);
        merger.add(at, at + c.size, true);
        from = at + c.size;
      }
      at += c.size;
    }
    if (from < piece.text.size()) merger.add(from, piece.text.size(), false);
    merger.finish();
  }

 private:
  Predicate is_match_;
  Behavior behavior_;
};

// Runs of word characters, and runs of other characters that are not white space.
class Words final : public PreTokenizer {
 public:
  void split(Piece piece, Work&, const PieceSink& sink) const override {
    constexpr int kSpace = 0, kWord = 1, kOther = 2;
    size_t begin = 0, end = 0;
    int kind = kSpace;
    const auto flush = [&] {
      if (kind != kSpace)
        sink({piece.text.substr(begin, end - begin), piece.starts_text && begin == 0});
    };
    while (end < piece.text.size()) {
      const Utf8Char c = decode_utf8(piece.text, end);
      const int next = has_class(c.code, kWordCharacter) || c.code == 0x200c || c.code == 0x200d
                           ? kWord
                       : has_class(c.code, kWhiteSpace) ? kSpace
                                                        : kOther;
      if (next != kind) flush(), begin = end, kind = next;
      end += c.size;
    }
    flush();
  }
};

// Prepends a space, unless the text starts with one.
class PrefixSpace final : public PreTokenizer {
 public:
  void split(Piece piece, Work& work, const PieceSink& sink) const override {
    if (piece.text.starts_with(' ')) return sink(piece);
    work.charge(piece.text.size() + 1);
    const std::string text = std::string(1, ' ').append(piece.text);
    sink({text, piece.starts_text});
  }
};

// Maps bytes to GPT-2's characters.
class ByteCharacters final : public PreTokenizer {
 public:
  void split(Piece piece, Work& work, const PieceSink& sink) const override {
    const std::string text = to_byte_characters(piece.text);
    work.charge(text.size());
    sink({text, piece.starts_text});
  }
};

class Metaspace final : public PreTokenizer {
 public:
  explicit Metaspace(const Json& json)
      : replacement_(text_or(json, "replacement", "\xe2\x96\x81")),
        splits_(flag(json, "split", true)) {
    if (decode_utf8(replacement_, 0).size != replacement_.size() || replacement_.empty())
      throw InputError(str("replacement must be one character, got ", excerpt(replacement_)));
    const std::string otherwise = flag(json, "add_prefix_space", true) ? "always" : "never";
    const std::string scheme = text_or(json, "prepend_scheme", otherwise);
    if (scheme != "always" && scheme != "first" && scheme != "never")
      throw InputError(str("unknown prepend_scheme '", scheme, "'; known: always, first, never"));
    always_ = scheme == "always", first_ = scheme == "first";
  }

  void split(Piece piece, Work& work, const PieceSink& sink) const override {
    std::string text;
    for (const char c : piece.text) {
      if (c == ' ')
        text += replacement_;
      else
        text += c;
    }
    if ((always_ || (first_ && piece.starts_text)) && !text.starts_with(replacement_))
      text.insert(0, replacement_);
    work.charge(text.size());
    if (!splits_) return sink({text, piece.starts_text});
    for (size_t at = 0; at < text.size();) {
      const size_t end = std::min(text.find(replacement_, at + 1), text.size());
      sink({std::string_view(text).substr(at, end - at), piece.starts_text && at == 0});
      at = end;
    }
  }

 private:
  std::string replacement_;
  bool splits_, always_, first_;
};

// Pieces of a fixed number of characters.
class FixedLength final : public PreTokenizer {
 public:
  explicit FixedLength(int64_t length) : length_(length) {
    if (length < 1) throw InputError(str("length must be at least 1, got ", length));
  }
  void split(Piece piece, Work&, const PieceSink& sink) const override {
    for (size_t at = 0; at < piece.text.size();) {
      size_t end = at;
      for (int64_t n = 0; n < length_ && end < piece.text.size(); ++n)
        end = next_utf8_boundary(piece.text, end + 1);
      sink({piece.text.substr(at, end - at), piece.starts_text && at == 0});
      at = end;
    }
  }

 private:
  int64_t length_;
};

class Sequence final : public PreTokenizer {
 public:
  explicit Sequence(Steps steps) : steps_(std::move(steps)) {}
  void split(Piece piece, Work& work, const PieceSink& sink) const override {
    run(0, piece, work, sink);
  }

 private:
  void run(size_t step, Piece piece, Work& work, const PieceSink& sink) const {
    if (step + 1 == steps_.size()) return steps_[step]->split(piece, work, sink);
    steps_[step]->split(piece, work, [&](Piece part) { run(step + 1, part, work, sink); });
  }

  Steps steps_;  // not empty
};

bool is_bert_punctuation(char32_t code) {
  const bool ascii = (code > 0x20 && code < '0') || (code > '9' && code < 'A') ||
                     (code > 'Z' && code < 'a') || (code > 'z' && code < 0x7f);
  return ascii || has_class(code, kPunctuation);
}
bool is_white_space(char32_t code) {
  return has_class(code, kWhiteSpace);
}
bool is_number(char32_t code) {
  return has_class(code, kNumber);
}

void add_characters(Steps& steps, CharacterSplit::Predicate predicate, Behavior behavior) {
  steps.push_back(std::make_unique<CharacterSplit>(std::move(predicate), behavior));
}

void add_pre_tokenizer(const Json& json, Steps& steps);

void add_sequence(const Json& json, Steps& steps) {
  for (const Json& item : json.at("pretokenizers").as_array()) {
    check_steps(steps.size() + 1);
    add_pre_tokenizer(item, steps);
  }
}

void add_split(const Json& json, Steps& steps) {
  Pattern pattern(json.at("pattern"));
  const Behavior behavior = behavior_of(json.at("behavior").as_string());
  const bool invert = flag(json, "invert", false);
  // Known patterns match all of a text, so removing the inverted matches is the same as isolating.
  const Splitter known = find_splitter(pattern.regex());
  if (known != nullptr && behavior == (invert ? Behavior::kRemoved : Behavior::kIsolated))
    steps.push_back(std::make_unique<KnownSplit>(known));
  else
    steps.push_back(std::make_unique<Split>(std::move(pattern), behavior,
                                            invert ? Split::Invert::kYes : Split::Invert::kNo));
}

void add_byte_level(const Json& json, Steps& steps) {
  if (flag(json, "add_prefix_space", true)) steps.push_back(std::make_unique<PrefixSpace>());
  if (flag(json, "use_regex", true))
    steps.push_back(std::make_unique<KnownSplit>(end_of_gpt2_word));
  steps.push_back(std::make_unique<ByteCharacters>());
}

void add_delimiter(const Json& json, Steps& steps) {
  const std::string& text = json.at("delimiter").as_string();
  const Utf8Char delimiter = decode_utf8(text, 0);
  if (delimiter.size == 0 || delimiter.size != text.size())
    throw InputError(str("delimiter must be one character, got ", excerpt(text)));
  add_characters(
      steps, [code = delimiter.code](char32_t c) { return c == code; }, Behavior::kRemoved);
}

struct Entry {
  const char* type;
  void (*add)(const Json& json, Steps& steps);
};
constexpr Entry kPreTokenizers[] = {
    {"Sequence", add_sequence},
    {"ByteLevel", add_byte_level},
    {"Split", add_split},
    {"Metaspace",
     [](const Json& json, Steps& steps) { steps.push_back(std::make_unique<Metaspace>(json)); }},
    {"Digits",
     [](const Json& json, Steps& steps) {
       add_characters(
           steps, is_number,
           flag(json, "individual_digits", false) ? Behavior::kIsolated : Behavior::kContiguous);
     }},
    {"Whitespace", [](const Json&, Steps& steps) { steps.push_back(std::make_unique<Words>()); }},
    {"WhitespaceSplit",
     [](const Json&, Steps& steps) { add_characters(steps, is_white_space, Behavior::kRemoved); }},
    {"Punctuation",
     [](const Json& json, Steps& steps) {
       add_characters(steps, is_bert_punctuation,
                      behavior_of(text_or(json, "behavior", "Isolated")));
     }},
    {"BertPreTokenizer",
     [](const Json&, Steps& steps) {
       add_characters(steps, is_white_space, Behavior::kRemoved);
       add_characters(steps, is_bert_punctuation, Behavior::kIsolated);
     }},
    {"CharDelimiterSplit", add_delimiter},
    {"FixedLength",
     [](const Json& json, Steps& steps) {
       const Json* length = json.find("length");
       steps.push_back(std::make_unique<FixedLength>(length == nullptr ? 5 : length->as_int()));
     }},
};

void add_pre_tokenizer(const Json& json, Steps& steps) {
  find_component(json, "pre_tokenizer", kPreTokenizers).add(json, steps);
}

}  // namespace

PreTokenization make_pre_tokenizer(const Json& json, WordText preferred) {
  PreTokenization out;
  if (json.is_null()) return out;
  Steps steps;
  add_pre_tokenizer(json, steps);
  if (preferred == WordText::kBytes && !steps.empty() &&
      dynamic_cast<const ByteCharacters*>(steps.back().get()) != nullptr) {
    steps.pop_back();
    out.words = WordText::kBytes;
  }
  if (steps.size() == 1)
    out.splitter = std::move(steps[0]);
  else if (!steps.empty())
    out.splitter = std::make_unique<Sequence>(std::move(steps));
  return out;
}

}  // namespace cohort
