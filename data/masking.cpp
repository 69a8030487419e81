#include "data/masking.h"

#include "core/rng.h"
#include "text/unicode.h"
#include "text/utf8.h"

namespace cohort {
namespace {

constexpr uint64_t kMaskPurpose = 11;
constexpr int kTokenBits = 20;  // lowest bits of the index of a draw

// True if the character before `at` and the one there belong to a word, or are the same one.
bool is_inside_word(std::string_view text, size_t at) {
  const auto is_part = [&](size_t begin) {
    return has_class(decode_utf8(text, begin).code, kLetter | kNumber | kMark);
  };
  return continues_utf8(text[at]) || (is_part(last_utf8_begin(text, at)) && is_part(at));
}

}  // namespace

void MaskingConfig::validate() const {
  if (mask + random > 1 + 1e-9)  // 0.7 + 0.3 may be rounded up
    throw InputError(str("mlm: mask + random is ", mask + random, "; hint: at most 1"));
}

Masking::Masking(const Tokenizer& tokenizer, const MaskingConfig& config, uint64_t seed)
    : config_(config), seed_(seed), mask_(tokenizer.mask_id().value_or(-1)) {
  config_.validate();
  if (mask_ < 0)
    throw InputError(
        "the tokenizer has no mask token; hint: name it as mask_token in tokenizer_config.json, or "
        "train one with --special '<|endoftext|>' --special '<mask>'");
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    texts_.push_back(tokenizer.token_text(id));
    if (!is_special(id) && id != mask_) ordinary_.push_back(id);
  }
  if (ordinary_.empty()) throw InputError("the tokenizer has special tokens only");
}

TokenSequence Masking::apply(std::span<const int32_t> window, int64_t step, int64_t index) const {
  COHORT_CHECK(window.size() <= size_t{1} << kTokenBits, "[masking] ", window.size(), " tokens");
  std::string text;
  std::vector<size_t> begins;
  for (const int32_t id : window) {
    COHORT_CHECK(id >= 0 && id < std::ssize(texts_), "[masking] the id ", id, " has no row");
    begins.push_back(text.size());
    text += is_special(id) ? std::string(1, ' ') : texts_[static_cast<size_t>(id)].bytes;
  }
  const uint64_t stream = rng_stream(kMaskPurpose, static_cast<uint64_t>(step));
  const auto draw = [&](size_t token) {
    return philox(seed_, stream, static_cast<uint64_t>(index) << kTokenBits | token);
  };
  std::vector<float> numbers(window.size());  // a word's, at all of its tokens
  float lowest = 2;
  for (size_t i = 0; i < window.size(); ++i) {
    const float special = is_special(window[i]) ? 1.0f : 0.0f;  // after all others
    const bool continues =
        config_.whole_words && i > 0 && special == 0 && !is_special(window[i - 1]) &&
        (texts_[static_cast<size_t>(window[i])].continues || is_inside_word(text, begins[i]));
    numbers[i] = continues ? numbers[i - 1] : uniform_f32(draw(i)[0]) + special;
    lowest = std::min(lowest, numbers[i]);
  }
  TokenSequence out{.tokens = {window.begin(), window.end()},
                    .index = index,
                    .labels = std::vector<int32_t>(window.size(), -1)};
  for (size_t i = 0; i < window.size(); ++i) {
    if (numbers[i] >= config_.probability && numbers[i] > lowest) continue;
    out.labels[i] = window[i];
    const auto bits = draw(i);
    const double kind = uniform_f32(bits[1]);
    if (kind < config_.mask)
      out.tokens[i] = mask_;
    else if (kind < config_.mask + config_.random)
      out.tokens[i] = ordinary_[uint64_t{bits[2]} * ordinary_.size() >> 32];
  }
  return out;
}

}  // namespace cohort
