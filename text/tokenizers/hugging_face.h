// Tokenizers in Hugging Face's formats: tokenizer.json with its pipeline of normaliser,
// pre-tokenizer, model, post-processor and decoder, GPT-2's vocab.json and merges.txt, or BERT's
// vocab.txt.
#pragma once

#include "text/tokenizer.h"

namespace cohort {

// Reads tokenizer.json, else vocab.json and merges.txt as GPT-2's byte-level BPE, else vocab.txt as
// BERT's WordPiece, with the options of tokenizer_config.json and BERT's defaults (lower case; the
// special tokens that have no line follow the last one). Added tokens also from
// tokenizer_config.json and added_tokens.json; special tokens also by their names in
// tokenizer_config.json and special_tokens_map.json; and the end-of-sequence token from the first
// of tokenizer_config.json, special_tokens_map.json, generation_config.json and config.json that
// names one. `where` names the files' folder in errors. Throws InputError.
std::unique_ptr<Tokenizer> make_hugging_face_tokenizer(NamedFiles files, const std::string& where);

// The parts of a tokenizer.json that is made here; the first four are JSON texts.
struct TokenizerParts {
  std::string pre_tokenizer, post_processor = "null", decoder;
  // `vocab` and `merges` are filled in. Default: byte-level BPE.
  std::string model = R"({"type": "BPE", "dropout": null, "unk_token": null,
    "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
    "byte_fallback": false, "ignore_merges": false, "vocab": null, "merges": []})";
  Json::Object vocabulary;
  Json merges;                                           // null: as in `model`
  std::vector<std::pair<std::string, int64_t>> special;  // texts and ids; the first ends a text
  int indent = 2;
};

// The files tokenizer.json, with all the fields that Hugging Face's library writes, in its order,
// and tokenizer_config.json.
NamedFiles tokenizer_files(TokenizerParts parts);

}  // namespace cohort
