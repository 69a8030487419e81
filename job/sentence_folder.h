// Folders of sentence-transformers: modules.json and the files of its modules, which say how a
// model embeds texts, as versions 2 to 6 write them; and the embeddings themselves.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "job/checkpoint.h"
#include "job/encode.h"

namespace cohort {

struct SentenceFolder {
  std::string model;               // the folder or run of the model itself
  std::optional<Pooling> pooling;  // none: it is no such folder
  bool normalize = true;
  int64_t max_tokens = INT64_MAX;  // per text, with its special tokens
  std::string prompt;              // precedes each text
};
// A path without modules.json is that of a model. `prompt`: the name of one; empty: the default.
// `pooling`: "mean", "cls" or "last" in place of the folder's mode; empty: that. Throws InputError
// naming the file for an unknown prompt, for modules and options that are not supported, and for a
// module outside of the folder.
SentenceFolder read_sentence_folder(const std::string& path, const std::string& prompt = "",
                                    const std::string& pooling = "");

// The tokens, without targets, of the folder's prompt, a text and maybe a second one. Returns true
// if they were cut to the folder's limit or the model's context. Throws InputError without a token.
bool encode_text(const LoadedModel& loaded, const SentenceFolder& folder, std::string_view text,
                 std::optional<std::string_view> pair, TokenSequence& out);
// embed() as the folder says; without a pooling an encoder's is the mean, a decoder's the last. An
// embedding that is not finite is empty.
std::vector<std::vector<float>> embed(const LoadedModel& loaded, const SentenceFolder& folder,
                                      std::span<const TokenSequence> texts,
                                      const std::function<void()>& before_batch = {});

}  // namespace cohort
