// Folders of sentence-transformers: modules.json and the files of its modules, which say how a
// model embeds texts, as versions 2 to 6 write them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace cohort {

// The hidden states that make an embedding: their mean over the tokens, the first or the last one.
enum class Pooling { kMean, kCls, kLast };

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

}  // namespace cohort
