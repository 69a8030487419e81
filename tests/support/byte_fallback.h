// A tokenizer like that of Llama 2: SentencePiece with a leading space and byte fallback.
#pragma once

#include <cstdio>
#include <memory>
#include <string>

#include "text/tokenizer.h"

namespace cohort::test {

// Ids: 0 <unk>, 1 <s>, 2 </s> (special), 3 + b for byte b, then "▁", "a", "b", "▁a", "▁b".
inline std::unique_ptr<Tokenizer> byte_fallback_tokenizer() {
  Json::Object vocab;
  const auto add = [&](const std::string& token) {
    vocab.emplace_back(token, static_cast<int64_t>(vocab.size()));
  };
  for (const char* token : {"<unk>", "<s>", "</s>"}) add(token);
  for (unsigned byte = 0; byte < 256; ++byte) {
    char token[8];
    std::snprintf(token, sizeof token, "<0x%02X>", byte);
    add(token);
  }
  for (const char* token : {"▁", "a", "b", "▁a", "▁b"}) add(token);
  Json added = Json::Array{};
  for (int64_t id = 0; id < 3; ++id)
    added.push_back(Json()
                        .set("id", id)
                        .set("content", vocab[static_cast<size_t>(id)].first)
                        .set("special", true));
  const auto replace = [](const char* from, const char* to) {
    return Json()
        .set("type", "Replace")
        .set("pattern", Json().set("String", from))
        .set("content", to);
  };
  const Json normalizer =
      Json()
          .set("type", "Sequence")
          .set("normalizers",
               Json::Array{Json().set("type", "Prepend").set("prepend", "▁"), replace(" ", "▁")});
  const Json decoder =
      Json()
          .set("type", "Sequence")
          .set(
              "decoders",
              Json::Array{
                  replace("▁", " "), Json().set("type", "ByteFallback"), Json().set("type", "Fuse"),
                  Json().set("type", "Strip").set("content", " ").set("start", 1).set("stop", 0)});
  Json json;
  json.set("added_tokens", std::move(added)).set("normalizer", normalizer).set("decoder", decoder);
  json.set("model", Json()
                        .set("type", "BPE")
                        .set("unk_token", "<unk>")
                        .set("byte_fallback", true)
                        .set("vocab", Json(std::move(vocab)))
                        .set("merges", Json::Array{"▁ a", "▁ b"}));
  return make_tokenizer(NamedFiles{{"tokenizer.json", json.dump()},
                                   {"tokenizer_config.json", "{\"eos_token\": \"</s>\"}"}},
                        "test");
}
inline int32_t byte_token(unsigned byte) {
  return static_cast<int32_t>(3 + byte);
}

}  // namespace cohort::test
