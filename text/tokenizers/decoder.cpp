// Each step processes tokens in order. ByteLevel and Fuse merge all tokens into one; the steps
// after them process that token in parts (Strip), or gather it first.
#include <algorithm>
#include <charconv>
#include <cstdint>
#include <optional>
#include <utility>

#include "text/tokenizers/byte_level.h"
#include "text/tokenizers/json_fields.h"
#include "text/tokenizers/pattern.h"
#include "text/tokenizers/pipeline.h"
#include "text/utf8.h"

namespace cohort {
namespace {

using Step = std::unique_ptr<DecodeStep>;

// A step that can be copied.
template <class T>
class CopyableStep : public DecodeStep {
 public:
  Step clone() const final { return std::make_unique<T>(static_cast<const T&>(*this)); }
};

// Maps each token by itself, given whether it is the first one.
class MapStep final : public CopyableStep<MapStep> {
 public:
  using Map = std::function<std::string(std::string_view token, bool first, Work& work)>;
  explicit MapStep(Map map) : map_(std::make_shared<Map>(std::move(map))) {}
  void push(std::string_view token, Work& work, const Sink& out) override {
    const std::string text = (*map_)(token, first_, work);
    work.charge(text.size());
    first_ = false;
    out(text);
  }

 private:
  std::shared_ptr<const Map> map_;
  bool first_ = true;
};

// Maps GPT-2's characters to bytes; a token with another character is copied.
class ByteLevelStep final : public CopyableStep<ByteLevelStep> {
 public:
  void push(std::string_view token, Work&, const Sink& out) override {
    const auto bytes = from_byte_characters(token);
    const std::string ready = bytes_.push(bytes ? *bytes : token);
    if (!ready.empty()) out(repair_utf8(ready));
  }
  void finish(Work&, const Sink& out) override { out(repair_utf8(bytes_.held())); }
  void discard() override { bytes_.discard(); }

 private:
  Utf8Stream bytes_;
};

// Tokens <0x00> to <0xFF> are bytes. A run of them that is not valid UTF-8 as a whole gives U+FFFD
// for each of its bytes, so it is held back until it ends. After discard() a new run begins with
// the bytes of an unfinished character: they are used only if they make the run valid.
class ByteFallbackStep final : public CopyableStep<ByteFallbackStep> {
 public:
  void push(std::string_view token, Work& work, const Sink& out) override {
    if (const std::optional<char> byte = byte_of(token)) {
      run_ += *byte;
      return;
    }
    finish(work, out);
    out(token);
  }
  void finish(Work&, const Sink& out) override {
    if (run_.size() > discarded_) {
      const auto kept = std::string_view(run_).substr(discarded_);
      if (is_utf8(run_)) {
        out(run_);
      } else if (is_utf8(kept)) {
        out(kept);
      } else {
        for (size_t i = 0; i < kept.size(); ++i) out("\xef\xbf\xbd");
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
  static std::optional<char> byte_of(std::string_view token) {
    if (token.size() != 6 || !token.starts_with("<0x") || !token.ends_with('>')) return {};
    const char* const end = &token[5];
    uint8_t byte = 0;
    if (std::from_chars(end - 2, end, byte, 16).ptr != end) return {};
    return static_cast<char>(byte);
  }

  std::string run_;
  size_t discarded_ = 0;  // bytes of run_
};

// Strips a character at the beginning and the end of each token, or of a fused token in parts.
class StripStep final : public CopyableStep<StripStep> {
 public:
  struct Options {
    std::string character;
    int64_t start, stop;  // the most to strip at each end
  };
  enum class Token { kWhole, kInParts };
  StripStep(Options options, Token token)
      : options_(std::move(options)), token_(token), start_left_(options_.start) {}

  void push(std::string_view text, Work& work, const Sink& out) override {
    const std::string& c = options_.character;
    while (start_left_ > 0 && text.starts_with(c)) text.remove_prefix(c.size()), --start_left_;
    if (!text.empty()) start_left_ = 0;
    int64_t tail = 0;
    size_t size = text.size();
    while (tail < options_.stop && text.substr(0, size).ends_with(c)) size -= c.size(), ++tail;
    const bool only_tail = size == 0;
    // At most `stop` characters at the end of a run are held back.
    const int64_t released = only_tail ? std::max<int64_t>(held_ + tail - options_.stop, 0) : held_;
    std::string ready;
    for (int64_t i = 0; i < released; ++i) ready += c;
    held_ = only_tail ? held_ + tail - released : tail;
    out(ready.append(text.substr(0, size)));
    if (token_ == Token::kWhole) finish(work, out);
  }
  void finish(Work&, const Sink&) override {
    held_ = 0;
    start_left_ = options_.start;
  }
  void discard() override { start_left_ = held_ = 0; }

 private:
  Options options_;
  Token token_;
  int64_t start_left_, held_ = 0;
};

// Gathers all tokens into one.
class GatherStep final : public CopyableStep<GatherStep> {
 public:
  void push(std::string_view token, Work&, const Sink&) override { all_ += token; }
  void finish(Work&, const Sink& out) override { out(all_); }

 private:
  std::string all_;
};

// Replaces the end-of-word suffix by a space, or by nothing in the last token.
class SuffixStep final : public CopyableStep<SuffixStep> {
 public:
  explicit SuffixStep(std::string suffix)
      : suffix_(std::make_shared<std::string>(std::move(suffix))) {}
  void push(std::string_view token, Work& work, const Sink& out) override {
    if (last_) flush(" ", work, out);
    last_ = std::string(token);
  }
  void finish(Work& work, const Sink& out) override {
    if (last_) flush("", work, out);
  }
  void discard() override {
    if (last_) discarded_ = text_of_last("").size();
  }

 private:
  std::string text_of_last(std::string_view replacement) const {
    return suffix_->empty() ? *last_ : replaced(*last_, *suffix_, replacement);
  }
  void flush(std::string_view replacement, Work& work, const Sink& out) {
    std::string text = text_of_last(replacement);
    work.charge(text.size());
    out(text.erase(0, std::min(std::exchange(discarded_, 0), text.size())));
  }

  std::shared_ptr<const std::string> suffix_;
  std::optional<std::string> last_;
  size_t discarded_ = 0;  // bytes of the last token's text
};

// Removes spaces before punctuation and contractions, as BERT's decoder does.
std::string clean_up(std::string text) {
  constexpr std::pair<const char*, const char*> kReplacements[] = {
      {" .", "."},   {" ?", "?"},     {" !", "!"},    {" ,", ","},
      {" ' ", "'"},  {" n't", "n't"}, {" 'm", "'m"},  {" do not", " don't"},
      {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"}};
  for (const auto& [from, to] : kReplacements) text = replaced(text, from, to);
  return text;
}

// Collects the steps of a decoder while its JSON is read.
struct DecoderBuilder {
  std::vector<Step> steps;
  bool fused = false;  // all tokens form one, which arrives in parts

  // Adds a step that needs whole tokens.
  void add(Step step) {
    if (std::exchange(fused, false)) steps.push_back(std::make_unique<GatherStep>());
    steps.push_back(std::move(step));
  }
  void add_map(MapStep::Map map) { add(std::make_unique<MapStep>(std::move(map))); }
};

void read_decoder(const Json& json, DecoderBuilder& builder);

void read_byte_level(const Json&, DecoderBuilder& builder) {
  builder.add(std::make_unique<ByteLevelStep>());
  builder.fused = true;
}

void read_replace(const Json& json, DecoderBuilder& builder) {
  builder.add_map([pattern = Pattern(json.at("pattern")), content = json.at("content").as_string()](
                      std::string_view token, bool, Work& work) {
    return pattern.replace_all(token, content, work);
  });
}

void read_strip(const Json& json, DecoderBuilder& builder) {
  StripStep::Options options{json.at("content").as_string(), json.at("start").as_int(),
                             json.at("stop").as_int()};
  only_character("content", options.character);
  if (options.start < 0 || options.stop < 0)
    throw InputError(
        str("start and stop must be at least 0, got ", options.start, " and ", options.stop));
  const auto token = builder.fused ? StripStep::Token::kInParts : StripStep::Token::kWhole;
  builder.steps.push_back(std::make_unique<StripStep>(std::move(options), token));
}

void read_metaspace(const Json& json, DecoderBuilder& builder) {
  const std::string otherwise = flag(json, "add_prefix_space", true) ? "always" : "never";
  const bool strips = text_or(json, "prepend_scheme", otherwise) != "never";
  const std::string replacement = text_or(json, "replacement", "\xe2\x96\x81");
  if (replacement.empty()) throw InputError("replacement must not be empty");
  builder.add_map([=](std::string_view token, bool first, Work&) {
    return replaced(token, replacement, first && strips ? "" : " ");
  });
}

void read_word_piece(const Json& json, DecoderBuilder& builder) {
  builder.add_map([prefix = text_or(json, "prefix", "##"), cleans = flag(json, "cleanup", true)](
                      std::string_view token, bool first, Work&) {
    const bool continues = !first && token.starts_with(prefix);
    std::string text(first || continues ? 0 : 1, ' ');
    text += continues ? token.substr(prefix.size()) : token;
    return cleans ? clean_up(std::move(text)) : text;
  });
}

void read_bpe(const Json& json, DecoderBuilder& builder) {
  builder.add(std::make_unique<SuffixStep>(text_or(json, "suffix", "</w>")));
}

void read_sequence(const Json& json, DecoderBuilder& builder) {
  for (const Json& item : json.at("decoders").as_array()) {
    check_steps(builder.steps.size() + 1);
    read_decoder(item, builder);
  }
}

constexpr Component<void(const Json&, DecoderBuilder&)> kDecoders[] = {
    {"Sequence", read_sequence},
    {"ByteLevel", read_byte_level},
    {"ByteFallback",
     [](const Json&, DecoderBuilder& builder) {
       builder.add(std::make_unique<ByteFallbackStep>());
     }},
    {"Replace", read_replace},
    {"Fuse", [](const Json&, DecoderBuilder& builder) { builder.fused = true; }},
    {"Strip", read_strip},
    {"Metaspace", read_metaspace},
    {"WordPiece", read_word_piece},
    {"BPEDecoder", read_bpe},
};

void read_decoder(const Json& json, DecoderBuilder& builder) {
  find_component(json, "decoder", kDecoders)(json, builder);
}

}  // namespace

Decoder::Decoder(const Json& json) {
  DecoderBuilder builder;
  if (json.is_null())
    builder.add_map([](std::string_view token, bool first, Work&) {
      return std::string(first ? 0 : 1, ' ').append(token);
    });
  else
    read_decoder(json, builder);
  steps_ = std::move(builder.steps);
}

Decoder::Decoder(const Decoder& other)
    : has_tokens_(other.has_tokens_), discarded_(other.discarded_) {
  for (const Step& step : other.steps_) steps_.push_back(step->clone());
}

void Decoder::push(size_t step, std::string_view token, Work& work, std::string& text) {
  if (step == steps_.size()) {
    work.charge(token.size());
    text += token;
    return;
  }
  steps_[step]->push(token, work, [&](std::string_view part) { push(step + 1, part, work, text); });
}

std::string Decoder::push(std::string_view token, Work& work) {
  has_tokens_ = true;
  std::string text;
  push(0, token, work, text);
  return text;
}

std::string Decoder::finish(Work& work) {
  std::string text;
  for (size_t step = 0; step < steps_.size(); ++step)
    steps_[step]->finish(work, [&](std::string_view part) { push(step + 1, part, work, text); });
  if (text.starts_with(discarded_)) text.erase(0, discarded_.size());
  return text;
}

void Decoder::discard(Work& work) {
  if (!has_tokens_) return;
  for (const Step& step : steps_) step->discard();
  discarded_ = peek(work);
}

}  // namespace cohort
