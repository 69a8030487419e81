// Folders of sentence-transformers: modules.json and the files of its modules, which say how a
// model embeds texts, as versions 2 to 6 write them.
#pragma once

#include <optional>
#include <string>

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
// Throws InputError naming the file for an unknown prompt, for modules and options that are not
// supported, and for a module outside of the folder.
SentenceFolder read_sentence_folder(const std::string& path, const std::string& prompt = "");

}  // namespace cohort
