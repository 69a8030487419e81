// A step sees one token after the other. ByteLevel and Fuse make one token of all; what follows
// them sees that token in parts (Strip), or waits for all of it.
#include "data/tokenizers/decoder.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "data/tokenizers/byte_level.h"
#include "data/tokenizers/json_fields.h"
#include "data/tokenizers/pattern.h"
#include "data/utf8.h"

namespace cohort {
namespace {

using Step = std::unique_ptr<DecodeStep>;

// A step that can be copied.
template <class T>
class CopyableStep : public DecodeStep {
 public:
  Step clone() const final { return std::make_unique<T>(static_cast<const T&>(*this)); }
};

// A token's text from its own text and whether it is the first one.
class MapStep final : public CopyableStep<MapStep> {
 public:
  using Map = std::function<std::string(std::string_view token, bool first, Work& work)>;
  explicit MapStep(const Map& map) : map_(map) {}
  void push(std::string_view token, Work& work, const TextSink& out) override {
    const std::string text = map_(token, first_, work);
    work.charge(text.size());
    first_ = false;
    out(text);
  }

 private:
  const Map& map_;  // the decoder's
  bool first_ = true;
};

// The bytes that GPT-2's characters stand for; a token with another character stands for itself.
class ByteLevelStep final : public CopyableStep<ByteLevelStep> {
 public:
  void push(std::string_view token, Work&, const TextSink& out) override {
    const auto bytes = from_byte_characters(token);
    const std::string ready = bytes_.push(bytes ? *bytes : token);
    if (!ready.empty()) out(repair_utf8(ready));
  }
  void finish(Work&, const TextSink& out) override { out(repair_utf8(bytes_.held())); }
  void discard() override { bytes_.discard(); }

 private:
  Utf8Stream bytes_;
};

// Tokens <0x00> to <0xFF> are bytes. A run of them that is no UTF-8 as a whole gives U+FFFD for
// each of its bytes, so it is held until it ends. After discard() a new run begins, with the bytes
// of an unfinished character before it: they count only if the run is UTF-8 with them.
class ByteFallbackStep final : public CopyableStep<ByteFallbackStep> {
 public:
  void push(std::string_view token, Work& work, const TextSink& out) override {
    if (const std::optional<char> byte = byte_of(token)) {
      run_ += *byte;
      return;
    }
    finish(work, out);
    out(token);
  }
  void finish(Work&, const TextSink& out) override {
    if (run_.size() > discarded_) {
      const auto own = std::string_view(run_).substr(discarded_);
      if (is_utf8(run_)) {
        out(run_);
      } else if (is_utf8(own)) {
        out(own);
      } else {
        for (size_t i = 0; i < own.size(); ++i) out("\xef\xbf\xbd");
      }
    }
    run_.clear();
    discarded_ = 0;
  }
  void discard() override {
    run_.erase(0, run_.size() - unfinished_utf8(run_));
    discarded_ = run_.size();
  }

 private:
  static int digit_of(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
  }
  static std::optional<char> byte_of(std::string_view token) {
    if (token.size() != 6 || !token.starts_with("<0x") || !token.ends_with('>')) return {};
    const int high = digit_of(token[3]), low = digit_of(token[4]);
    if (high < 0 || low < 0) return {};
    return static_cast<char>(high << 4 | low);
  }

  std::string run_;
  size_t discarded_ = 0;  // bytes of run_
};

// Takes a character away at the begin and the end of each token, or of the only one in parts.
class StripStep final : public CopyableStep<StripStep> {
 public:
  struct What {
    std::string character;
    int64_t start, stop;  // at most so many
  };
  enum class Token { kWhole, kInParts };
  StripStep(const What& what, Token token) : what_(what), token_(token), start_left_(what.start) {}

  void push(std::string_view text, Work& work, const TextSink& out) override {
    const std::string& c = what_.character;
    while (start_left_ > 0 && text.starts_with(c)) text.remove_prefix(c.size()), --start_left_;
    if (!text.empty()) start_left_ = 0;
    int64_t tail = 0;
    size_t size = text.size();
    while (tail < what_.stop && text.substr(0, size).ends_with(c)) size -= c.size(), ++tail;
    const bool only_tail = size == 0;
    // Of a longer run of the character, the last `stop` are held.
    const int64_t passed = only_tail ? std::max<int64_t>(held_ + tail - what_.stop, 0) : held_;
    std::string ready;
    for (int64_t i = 0; i < passed; ++i) ready += c;
    held_ = only_tail ? held_ + tail - passed : tail;
    out(ready.append(text.substr(0, size)));
    if (token_ == Token::kWhole) finish(work, out);
  }
  void finish(Work&, const TextSink&) override {
    held_ = 0;
    start_left_ = what_.start;
  }
  void discard() override { start_left_ = held_ = 0; }

 private:
  const What& what_;  // the decoder's
  Token token_;
  int64_t start_left_, held_ = 0;
};

// All tokens as one.
class GatherStep final : public CopyableStep<GatherStep> {
 public:
  void push(std::string_view token, Work&, const TextSink& out) override {
    (void)out;
    all_ += token;
  }
  void finish(Work&, const TextSink& out) override { out(all_); }

 private:
  std::string all_;
};

std::string replaced(std::string_view text, std::string_view from, std::string_view to) {
  std::string out;
  size_t begin = 0;
  for (size_t at; (at = text.find(from, begin)) != text.npos; begin = at + from.size())
    out.append(text.substr(begin, at - begin)).append(to);
  return out.append(text.substr(begin));
}

// The end-of-word suffix is a space, but for the last token.
class SuffixStep final : public CopyableStep<SuffixStep> {
 public:
  explicit SuffixStep(const std::string& suffix) : suffix_(suffix) {}
  void push(std::string_view token, Work& work, const TextSink& out) override {
    if (last_) pass(" ", work, out);
    last_ = std::string(token);
  }
  void finish(Work& work, const TextSink& out) override {
    if (last_) pass("", work, out);
  }
  void discard() override {
    if (last_) discarded_ = text_of_last("").size();
  }

 private:
  std::string text_of_last(std::string_view replacement) const {
    return suffix_.empty() ? *last_ : replaced(*last_, suffix_, replacement);
  }
  void pass(std::string_view replacement, Work& work, const TextSink& out) {
    std::string text = text_of_last(replacement);
    work.charge(text.size());
    out(text.erase(0, std::min(std::exchange(discarded_, 0), text.size())));
  }

  const std::string& suffix_;  // the decoder's
  std::optional<std::string> last_;
  size_t discarded_ = 0;  // bytes of the last token's text
};

// What English puts no space before, as BERT's decoder has it.
std::string clean_up(std::string text) {
  constexpr std::pair<const char*, const char*> kReplacements[] = {
      {" .", "."},   {" ?", "?"},     {" !", "!"},    {" ,", ","},
      {" ' ", "'"},  {" n't", "n't"}, {" 'm", "'m"},  {" do not", " don't"},
      {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"}};
  for (const auto& [from, to] : kReplacements) text = replaced(text, from, to);
  return text;
}

// Adds steps to a decoder that is being read.
struct Reading {
  std::vector<Decoder::MakeStep> steps;
  bool fused = false;  // all tokens are one, which comes in parts

  // Before a step that needs whole tokens.
  void need_whole() {
    if (fused) steps.push_back([] { return std::make_unique<GatherStep>(); });
    fused = false;
  }
  void add_map(MapStep::Map map) {
    need_whole();
    steps.push_back([map = std::make_shared<MapStep::Map>(std::move(map))] {
      return std::make_unique<MapStep>(*map);
    });
  }
};

void read_decoder(const Json& json, Reading& in);

void read_byte_level(const Json&, Reading& in) {
  in.need_whole();
  in.steps.push_back([] { return std::make_unique<ByteLevelStep>(); });
  in.fused = true;
}

void read_byte_fallback(const Json&, Reading& in) {
  in.need_whole();
  in.steps.push_back([] { return std::make_unique<ByteFallbackStep>(); });
}

void read_replace(const Json& json, Reading& in) {
  in.add_map([pattern = Pattern(json.at("pattern")), content = json.at("content").as_string()](
                 std::string_view token, bool, Work& work) {
    return pattern.replace_all(token, content, work);
  });
}

void read_strip(const Json& json, Reading& in) {
  StripStep::What what{json.at("content").as_string(), json.at("start").as_int(),
                       json.at("stop").as_int()};
  const Utf8Char c = decode_utf8(what.character, 0);
  if (c.size == 0 || c.size != what.character.size())
    throw InputError(str("content must be one character, got ", excerpt(what.character)));
  if (what.start < 0 || what.stop < 0)
    throw InputError(
        str("start and stop must be at least 0, got ", what.start, " and ", what.stop));
  const auto token = in.fused ? StripStep::Token::kInParts : StripStep::Token::kWhole;
  in.steps.push_back([what = std::make_shared<StripStep::What>(std::move(what)), token] {
    return std::make_unique<StripStep>(*what, token);
  });
}

void read_metaspace(const Json& json, Reading& in) {
  const std::string otherwise = flag(json, "add_prefix_space", true) ? "always" : "never";
  const bool strips = text_or(json, "prepend_scheme", otherwise) != "never";
  const std::string replacement = text_or(json, "replacement", "\xe2\x96\x81");
  if (replacement.empty()) throw InputError("replacement must not be empty");
  in.add_map([=](std::string_view token, bool first, Work&) {
    return replaced(token, replacement, first && strips ? "" : " ");
  });
}

void read_word_piece(const Json& json, Reading& in) {
  in.add_map([prefix = text_or(json, "prefix", "##"), cleans = flag(json, "cleanup", true)](
                 std::string_view token, bool first, Work&) {
    const bool goes_on = !first && token.starts_with(prefix);
    std::string text(first || goes_on ? 0 : 1, ' ');
    text += goes_on ? token.substr(prefix.size()) : token;
    return cleans ? clean_up(std::move(text)) : text;
  });
}

void read_bpe(const Json& json, Reading& in) {
  in.need_whole();
  in.steps.push_back([suffix = std::make_shared<std::string>(text_or(json, "suffix", "</w>"))] {
    return std::make_unique<SuffixStep>(*suffix);
  });
}

void read_sequence(const Json& json, Reading& in) {
  for (const Json& item : json.at("decoders").as_array()) {
    check_steps(in.steps.size() + 1);
    read_decoder(item, in);
  }
}

struct Entry {
  const char* type;
  void (*read)(const Json& json, Reading& in);
};
constexpr Entry kDecoders[] = {
    {"Sequence", read_sequence},
    {"ByteLevel", read_byte_level},
    {"ByteFallback", read_byte_fallback},
    {"Replace", read_replace},
    {"Fuse", [](const Json&, Reading& in) { in.fused = true; }},
    {"Strip", read_strip},
    {"Metaspace", read_metaspace},
    {"WordPiece", read_word_piece},
    {"BPEDecoder", read_bpe},
};

void read_decoder(const Json& json, Reading& in) {
  find_component(json, "decoder", kDecoders).read(json, in);
}

}  // namespace

Decoder::Decoder(const Json& json) {
  Reading in;
  if (json.is_null())
    in.add_map([](std::string_view token, bool first, Work&) {
      return std::string(first ? 0 : 1, ' ').append(token);
    });
  else
    read_decoder(json, in);
  steps_ = std::move(in.steps);
}

DecodeSteps Decoder::start() const {
  std::vector<Step> steps;
  for (const MakeStep& make : steps_) steps.push_back(make());
  return DecodeSteps(std::move(steps));
}

void DecodeSteps::push(size_t step, std::string_view token, Work& work, std::string& text) {
  if (step == steps_.size()) {
    work.charge(token.size());
    text += token;
    return;
  }
  steps_[step]->push(token, work, [&](std::string_view part) { push(step + 1, part, work, text); });
}

std::string DecodeSteps::push(std::string_view token, Work& work) {
  has_tokens_ = true;
  std::string text;
  push(0, token, work, text);
  return text;
}

std::string DecodeSteps::finish(Work& work) {
  std::string text;
  for (size_t step = 0; step < steps_.size(); ++step)
    steps_[step]->finish(work, [&](std::string_view part) { push(step + 1, part, work, text); });
  if (text.starts_with(discarded_)) text.erase(0, discarded_.size());
  return text;
}

std::string DecodeSteps::peek(Work& work) const {
  std::vector<Step> copies;
  for (const Step& step : steps_) copies.push_back(step->clone());
  DecodeSteps copy(std::move(copies));
  copy.discarded_ = discarded_;
  return copy.finish(work);
}

void DecodeSteps::discard(Work& work) {
  if (!has_tokens_) return;  // the text has not begun
  for (const Step& step : steps_) step->discard();
  discarded_ = peek(work);
}

}  // namespace cohort
