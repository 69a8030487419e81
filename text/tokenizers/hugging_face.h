// Tokenizers in Hugging Face's formats: tokenizer.json with its pipeline of normaliser,
// pre-tokenizer, model, post-processor and decoder, or GPT-2's vocab.json and merges.txt.
#pragma once

#include <memory>
#include <string>

#include "text/tokenizer.h"

namespace cohort {

// Reads tokenizer.json, else vocab.json and merges.txt as GPT-2's byte-level BPE; added
// tokens also from tokenizer_config.json and added_tokens.json, and the end-of-sequence token from
// the first of tokenizer_config.json, special_tokens_map.json, generation_config.json and
// config.json that names one. `where` names the files' folder in errors. Throws InputError.
std::unique_ptr<Tokenizer> make_hugging_face_tokenizer(NamedFiles files, const std::string& where);

}  // namespace cohort
