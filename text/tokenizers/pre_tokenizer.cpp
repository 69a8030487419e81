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

using Steps = std::vector<PreTokenizer>;

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

// Bytes [begin, end) of a piece.
Piece part_of(Piece piece, size_t begin, size_t end) {
  return {piece.text.substr(begin, end - begin), piece.starts_text && begin == 0};
}

// Splits at matches: find_all(text, work, found) calls found(begin, end) for each, in order. With
// `invert` the parts between them are the matches.
template <class FindAll>
PreTokenizer split_at_matches(FindAll find_all, Behavior behavior, bool invert) {
  return [=](Piece piece, Work& work, const PieceSink& sink) {
    PieceMerger merger(piece, behavior, sink);
    size_t from = 0;
    find_all(piece.text, work, [&](size_t begin, size_t end) {
      if (begin > from) merger.add(from, begin, invert);
      merger.add(begin, end, !invert);
      from = end;
    });
    if (from < piece.text.size()) merger.add(from, piece.text.size(), invert);
    merger.finish();
  };
}

// Consecutive pieces, each from `at` to end_of(text, at).
template <class EndOf>
PreTokenizer split_at_ends(EndOf end_of) {
  return [end_of](Piece piece, Work&, const PieceSink& sink) {
    for (size_t at = 0, end = 0; at < piece.text.size(); at = end) {
      end = end_of(piece.text, at);
      sink(part_of(piece, at, end));
    }
  };
}

// Splits with the characters that satisfy a predicate as matches.
template <class Predicate>
PreTokenizer split_at_characters(Predicate is_match, Behavior behavior) {
  const auto find_all = [is_match](std::string_view text, Work&, const auto& found) {
    for (size_t at = 0; at < text.size();) {
      const Utf8Char c = decode_utf8(text, at);
      COHORT_CHECK(c.size > 0, "[pre_tokenizer] byte ", at, " is not UTF-8");
      if (is_match(c.code)) found(at, at + c.size);
      at += c.size;
    }
  };
  return split_at_matches(find_all, behavior, false);
}

// Runs of word characters, and runs of other characters that are not white space.
void split_words(Piece piece, Work&, const PieceSink& sink) {
  constexpr int kSpace = 0, kWord = 1, kOther = 2;
  size_t begin = 0, end = 0;
  int kind = kSpace;
  const auto flush = [&] {
    if (kind != kSpace) sink(part_of(piece, begin, end));
  };
  while (end < piece.text.size()) {
    const Utf8Char c = decode_utf8(piece.text, end);
    const int next = has_class(c.code, kWordCharacter) ? kWord
                     : has_class(c.code, kWhiteSpace)  ? kSpace
                                                       : kOther;
    if (next != kind) flush(), begin = end, kind = next;
    end += c.size;
  }
  flush();
}

// Prepends a space, unless the text starts with one.
void add_prefix_space(Piece piece, Work& work, const PieceSink& sink) {
  if (piece.text.starts_with(' ')) return sink(piece);
  work.charge(piece.text.size() + 1);
  const std::string text = std::string(1, ' ').append(piece.text);
  sink({text, piece.starts_text});
}

// Maps bytes to GPT-2's characters.
void map_bytes(Piece piece, Work& work, const PieceSink& sink) {
  const std::string text = to_byte_characters(piece.text);
  work.charge(text.size());
  sink({text, piece.starts_text});
}

PreTokenizer make_metaspace(const Json& json) {
  const std::string replacement = text_or(json, "replacement", "\xe2\x96\x81");
  const bool splits = flag(json, "split", true);
  if (decode_utf8(replacement, 0).size != replacement.size() || replacement.empty())
    throw InputError(str("replacement must be one character, got ", excerpt(replacement)));
  const std::string otherwise = flag(json, "add_prefix_space", true) ? "always" : "never";
  const std::string scheme = text_or(json, "prepend_scheme", otherwise);
  if (scheme != "always" && scheme != "first" && scheme != "never")
    throw InputError(str("unknown prepend_scheme '", scheme, "'; known: always, first, never"));
  return [=, always = scheme == "always", first = scheme == "first"](Piece piece, Work& work,
                                                                     const PieceSink& sink) {
    std::string text;
    for (const char c : piece.text) {
      if (c == ' ')
        text += replacement;
      else
        text += c;
    }
    if ((always || (first && piece.starts_text)) && !text.starts_with(replacement))
      text.insert(0, replacement);
    work.charge(text.size());
    const Piece whole{text, piece.starts_text};
    if (!splits) return sink(whole);
    for (size_t at = 0, end = 0; at < text.size(); at = end) {
      end = std::min(text.find(replacement, at + 1), text.size());
      sink(part_of(whole, at, end));
    }
  };
}

// Pieces of `length` characters.
PreTokenizer split_lengths(int64_t length) {
  if (length < 1) throw InputError(str("length must be at least 1, got ", length));
  return split_at_ends([length](std::string_view text, size_t at) {
    for (int64_t n = 0; n < length && at < text.size(); ++n) at = next_utf8_boundary(text, at + 1);
    return at;
  });
}

// Passes a piece through the steps from `step` on; there is at least one.
void run(const Steps& steps, size_t step, Piece piece, Work& work, const PieceSink& sink) {
  if (step + 1 == steps.size()) return steps[step](piece, work, sink);
  steps[step](piece, work, [&](Piece part) { run(steps, step + 1, part, work, sink); });
}

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

void add_pre_tokenizer(const Json& json, Steps& steps);

void add_sequence(const Json& json, Steps& steps) {
  for (const Json& item : json.at("pretokenizers").as_array()) {
    check_steps(steps.size() + 1);
    add_pre_tokenizer(item, steps);
  }
}

void add_split(const Json& json, Steps& steps) {
  const Pattern pattern(json.at("pattern"));
  const Behavior behavior = behavior_of(json.at("behavior").as_string());
  const bool invert = flag(json, "invert", false);
  // Known patterns match all of a text, so removing the inverted matches is the same as isolating.
  const Splitter known = find_splitter(pattern.regex());
  if (known != nullptr && behavior == (invert ? Behavior::kRemoved : Behavior::kIsolated))
    steps.push_back(split_at_ends(known));
  else
    steps.push_back(
        split_at_matches([pattern](auto text, Work& work,
                                   const auto& found) { pattern.find_all(text, work, found); },
                         behavior, invert));
}

void add_byte_level(const Json& json, Steps& steps) {
  if (flag(json, "add_prefix_space", true)) steps.push_back(add_prefix_space);
  if (flag(json, "use_regex", true)) steps.push_back(split_at_ends(end_of_gpt2_word));
  steps.push_back(map_bytes);
}

void add_delimiter(const Json& json, Steps& steps) {
  const std::string& text = json.at("delimiter").as_string();
  const Utf8Char delimiter = decode_utf8(text, 0);
  if (delimiter.size == 0 || delimiter.size != text.size())
    throw InputError(str("delimiter must be one character, got ", excerpt(text)));
  steps.push_back(split_at_characters([code = delimiter.code](char32_t c) { return c == code; },
                                      Behavior::kRemoved));
}

struct Entry {
  const char* type;
  void (*add)(const Json& json, Steps& steps);
};
constexpr Entry kPreTokenizers[] = {
    {"Sequence", add_sequence},
    {"ByteLevel", add_byte_level},
    {"Split", add_split},
    {"Metaspace", [](const Json& json, Steps& steps) { steps.push_back(make_metaspace(json)); }},
    {"Digits",
     [](const Json& json, Steps& steps) {
       steps.push_back(split_at_characters(is_number, flag(json, "individual_digits", false)
                                                          ? Behavior::kIsolated
                                                          : Behavior::kContiguous));
     }},
    {"Whitespace", [](const Json&, Steps& steps) { steps.push_back(split_words); }},
    {"WhitespaceSplit",
     [](const Json&, Steps& steps) {
       steps.push_back(split_at_characters(is_white_space, Behavior::kRemoved));
     }},
    {"Punctuation",
     [](const Json& json, Steps& steps) {
       steps.push_back(split_at_characters(is_bert_punctuation,
                                           behavior_of(text_or(json, "behavior", "Isolated"))));
     }},
    {"BertPreTokenizer",
     [](const Json&, Steps& steps) {
       steps.push_back(split_at_characters(is_white_space, Behavior::kRemoved));
       steps.push_back(split_at_characters(is_bert_punctuation, Behavior::kIsolated));
     }},
    {"CharDelimiterSplit", add_delimiter},
    {"FixedLength",
     [](const Json& json, Steps& steps) {
       const Json* length = json.find("length");
       steps.push_back(split_lengths(length == nullptr ? 5 : length->as_int()));
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
  using Function = void (*)(Piece, Work&, const PieceSink&);
  const Function* last = steps.empty() ? nullptr : steps.back().target<Function>();
  if (preferred == WordText::kBytes && last != nullptr && *last == map_bytes) {
    steps.pop_back();
    out.words = WordText::kBytes;
  }
  if (steps.size() == 1)
    out.split = std::move(steps[0]);
  else if (!steps.empty())
    out.split = [steps](Piece piece, Work& work, const PieceSink& sink) {
      run(steps, 0, piece, work, sink);
    };
  return out;
}

}  // namespace cohort
