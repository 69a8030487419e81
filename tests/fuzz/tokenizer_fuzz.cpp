// Input: a tokenizer.json, or after "vocab:" a vocab.txt, and after a zero byte a text to encode
// and decode. An InputError is an expected result; a stream must return the text of decode().
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "core/check.h"
#include "text/tokenizer.h"

namespace {

using namespace cohort;

void expect(bool condition, const char* failure) {
  if (condition) return;
  std::fprintf(stderr, "tokenizer_fuzz: %s\n", failure);
  std::abort();
}

void use(const Tokenizer& tokenizer, std::string_view text) {
  const auto ids = tokenizer.encode(text, SpecialTokens::kAdd);
  const Surrounding around = tokenizer.surrounding();
  expect(ids.size() == tokenizer.encode(text).size() + around.before.size() + around.after.size(),
         "encode() adds other tokens than surrounding()");
  constexpr int64_t kLimit = 2000;  // more than a template has
  const EncodedText both = tokenizer.encode_texts(text, text, kLimit);
  expect(both.ids.size() <= kLimit && both.types.size() == both.ids.size(), "a pair is too long");
  for (const int32_t id : ids) tokenizer.token_text(id);
  expect(ids == tokenizer.encode(text, SpecialTokens::kAdd), "two calls return different ids");
  for (const SpecialText special :
       {SpecialText::kHide, SpecialText::kShow, SpecialText::kHideControl}) {
    const auto stream = tokenizer.decode_stream(special);
    std::string streamed;
    for (const int32_t id : ids) streamed += stream->push(id);
    streamed += stream->peek();
    expect(streamed == tokenizer.decode(ids, special), "a stream returns another text");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t zero = input.find('\0');
  constexpr std::string_view kVocabulary = "vocab:";
  const std::string_view file = input.substr(0, zero);
  const std::string_view text = zero == input.npos
                                    ? "Hello  world, it's 123!\n \xc3\xa9\xe4\xbd\xa0 <s>"
                                    : input.substr(zero + 1);
  try {
    const auto tokenizer =
        file.starts_with(kVocabulary)
            ? make_tokenizer({{"vocab.txt", std::string(file.substr(kVocabulary.size()))}}, "fuzz")
            : make_tokenizer({{"tokenizer.json", std::string(file)}}, "fuzz");
    use(*tokenizer, text);
    tokenizer->eos_id();
  } catch (const InputError&) {
  }
  return 0;
}
