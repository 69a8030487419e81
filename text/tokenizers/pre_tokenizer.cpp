// Each step passes its pieces to the next one, so that no list of words is stored.
#include <utility>

#include "text/tokenizers/byte_level.h"
#include "text/tokenizers/json_fields.h"
#include "text/tokenizers/pattern.h"
#include "text/tokenizers/pipeline.h"
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

// Bytes [begin, end) of a piece.
Piece part_of(Piece piece, size_t begin, size_t end) {
  return {piece.text.substr(begin, end - begin), piece.starts_text && begin == 0};
}

// Takes the matches of a text and the parts between them in order, and outputs pieces merged by a
// behaviour.
class PieceMerger {
 public:
  PieceMerger(Piece piece, Behavior behavior, const PieceSink& sink)
      : piece_(piece), behavior_(behavior), sink_(sink) {}

  // The next match, or part between matches, ends at `end`.
  void add(size_t end, bool match) {
    const bool merges = behavior_ == Behavior::kMergedWithPrevious ? match && !last_match_
                        : behavior_ == Behavior::kMergedWithNext   ? !match && last_match_
                        : behavior_ == Behavior::kContiguous       ? match == last_match_
                                                                   : false;
    last_match_ = match;
    if (!merges) flush();
    end_ = end;
    if (behavior_ == Behavior::kRemoved && match) begin_ = end;
  }
  // Outputs the piece held back.
  void flush() {
    if (end_ > begin_) sink_(part_of(piece_, begin_, end_));
    begin_ = end_;
  }

 private:
  Piece piece_;
  Behavior behavior_;
  const PieceSink& sink_;
  size_t begin_ = 0, end_ = 0;  // the piece held back
  bool last_match_ = false;
};

// Splits at matches: find_all(text, work, found) calls found(begin, end) for each, in order. With
// `invert` the parts between them are the matches.
template <class FindAll>
PreTokenizer split_at_matches(FindAll find_all, Behavior behavior, bool invert) {
  return [=](Piece piece, Work& work, const PieceSink& sink) {
    PieceMerger merger(piece, behavior, sink);
    size_t from = 0;
    find_all(piece.text, work, [&](size_t begin, size_t end) {
      if (begin > from) merger.add(begin, invert);
      merger.add(end, !invert);
      from = end;
    });
    if (from < piece.text.size()) merger.add(piece.text.size(), invert);
    merger.flush();
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

// Characters are removed, pieces of their own, or parts of a run of their kind.
enum class Kind { kRemoved, kSingle, kFirst, kSecond };

// Splits by kind_of(character).
template <class KindOf>
PreTokenizer split_by_kind(KindOf kind_of) {
  return [kind_of](Piece piece, Work&, const PieceSink& sink) {
    size_t begin = 0, end = 0;
    Kind kind = Kind::kRemoved;
    const auto flush = [&] {
      if (kind != Kind::kRemoved) sink(part_of(piece, begin, end));
      begin = end;
    };
    for_characters(piece.text, [&](Utf8Char c, size_t at) {
      const Kind next = kind_of(c.code);
      if (next != kind || next == Kind::kSingle) flush();
      kind = next;
      end = at + c.size;
    });
    flush();
  };
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

Kind word_kind(char32_t code) {
  if (has_class(code, kWordCharacter)) return Kind::kFirst;
  return is_white_space(code) ? Kind::kRemoved : Kind::kSecond;
}
Kind space_kind(char32_t code) {
  return is_white_space(code) ? Kind::kRemoved : Kind::kFirst;
}
Kind bert_kind(char32_t code) {
  return is_bert_punctuation(code) ? Kind::kSingle : space_kind(code);
}

void add_pre_tokenizer(const Json& json, Steps& steps);

void add_sequence(const Json& json, Steps& steps) {
  for (const Json& item : json.at("pretokenizers").as_array()) {
    check_steps(steps.size() + 1);
    add_pre_tokenizer(item, steps);
  }
}

// Splits with the matches of a pattern.
PreTokenizer split_at_pattern(Pattern pattern, Behavior behavior, bool invert) {
  return split_at_matches(
      [pattern](auto text, Work& work, const auto& found) { pattern.find_all(text, work, found); },
      behavior, invert);
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
    steps.push_back(split_at_pattern(pattern, behavior, invert));
}

void add_metaspace(const Json& json, Steps& steps) {
  const std::string replacement = text_or(json, "replacement", "\xe2\x96\x81");
  const bool splits = flag(json, "split", true);
  only_character("replacement", replacement);
  const std::string otherwise = flag(json, "add_prefix_space", true) ? "always" : "never";
  const std::string scheme = text_or(json, "prepend_scheme", otherwise);
  if (scheme != "always" && scheme != "first" && scheme != "never")
    throw InputError(str("unknown prepend_scheme '", scheme, "'; known: always, first, never"));
  steps.push_back([=, always = scheme == "always", first = scheme == "first"](
                      Piece piece, Work& work, const PieceSink& sink) {
    std::string text = replaced(piece.text, " ", replacement);
    if ((always || (first && piece.starts_text)) && !text.starts_with(replacement))
      text.insert(0, replacement);
    work.charge(text.size());
    sink({text, piece.starts_text});
  });
  if (splits)
    steps.push_back(split_at_pattern(Pattern(Json().set("String", replacement)),
                                     Behavior::kMergedWithNext, false));
}

void add_byte_level(const Json& json, Steps& steps) {
  if (flag(json, "add_prefix_space", true)) steps.push_back(add_prefix_space);
  if (flag(json, "use_regex", true)) steps.push_back(split_at_ends(find_splitter(kGpt2Pattern)));
  steps.push_back(map_bytes);
}

void add_delimiter(const Json& json, Steps& steps) {
  const std::string& text = json.at("delimiter").as_string();
  only_character("delimiter", text);
  steps.push_back(split_at_pattern(Pattern(Json().set("String", text)), Behavior::kRemoved, false));
}

void add_digits(const Json& json, Steps& steps) {
  const Kind digit = flag(json, "individual_digits", false) ? Kind::kSingle : Kind::kSecond;
  steps.push_back(split_by_kind(
      [digit](char32_t code) { return has_class(code, kNumber) ? digit : Kind::kFirst; }));
}

void add_punctuation(const Json& json, Steps& steps) {
  const auto find_all = [](std::string_view text, Work&, const auto& found) {
    for_characters(text, [&](Utf8Char c, size_t at) {
      if (is_bert_punctuation(c.code)) found(at, at + c.size);
    });
  };
  const Behavior behavior = behavior_of(text_or(json, "behavior", "Isolated"));
  steps.push_back(split_at_matches(find_all, behavior, false));
}

constexpr Component<void(const Json&, Steps&)> kPreTokenizers[] = {
    {"Sequence", add_sequence},
    {"ByteLevel", add_byte_level},
    {"Split", add_split},
    {"Metaspace", add_metaspace},
    {"Digits", add_digits},
    {"Whitespace", [](const Json&, Steps& steps) { steps.push_back(split_by_kind(word_kind)); }},
    {"WhitespaceSplit",
     [](const Json&, Steps& steps) { steps.push_back(split_by_kind(space_kind)); }},
    {"Punctuation", add_punctuation},
    {"BertPreTokenizer",
     [](const Json&, Steps& steps) { steps.push_back(split_by_kind(bert_kind)); }},
    {"CharDelimiterSplit", add_delimiter},
    {"FixedLength",
     [](const Json& json, Steps& steps) {
       const Json* length = json.find("length");
       steps.push_back(split_lengths(length == nullptr ? 5 : length->as_int()));
     }},
};

void add_pre_tokenizer(const Json& json, Steps& steps) {
  find_component(json, "pre_tokenizer", kPreTokenizers)(json, steps);
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
  if (!steps.empty())
    out.split = [steps](Piece piece, Work& work, const PieceSink& sink) {
      run(steps, 0, piece, work, sink);
    };
  return out;
}

}  // namespace cohort
