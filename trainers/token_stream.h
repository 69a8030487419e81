// The tokens of a text: in memory, or made once into files that are read where they are needed.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/corpus.h"
#include "data/file.h"
#include "data/tokenizer.h"

namespace cohort {

class TokenStream {
 public:
  TokenStream() = default;
  explicit TokenStream(std::vector<int32_t> tokens);

  int64_t size() const { return size_; }
  // Tokens [begin, begin + count). Throws InputError if their file can no longer be read.
  std::vector<int32_t> read(int64_t begin, int64_t count) const;
  // Tells the system that they will be read soon.
  void will_read(int64_t begin, int64_t count) const;
  // Puts the tokens of another stream after these.
  void append(TokenStream other);

 private:
  friend class TokenShards;
  struct Part {
    std::vector<int32_t> tokens;      // in memory, or
    std::unique_ptr<InputFile> file;  // of 16- or 32-bit numbers after a header
    int64_t width = 0;                // bytes of each
    int32_t vocab_size = 0;
    int64_t begin = 0, end = 0;  // in the stream
  };
  void add(Part part, int64_t count);
  std::vector<Part> parts_;
  int64_t size_ = 0;
};

// Where the files of tokens are, and what they depend on besides the spans.
struct TokenCache {
  std::string dir;       // data.cache_dir; empty: a short text stays in memory, see kShortText
  std::string checksum;  // of the files of the text
};
// Bytes of text at most that stay in memory where no folder is named.
inline constexpr int64_t kShortText = 64 << 20;

// The tokens of `text`, each document with `document_end` after it where that is given. Those of a
// text that is not short are made by all threads into DIR/FINGERPRINT/NNNNN.tokens, of 1 GB of text
// each, unless they are there: another process that makes them is waited for, and what an
// interrupted one has finished is kept. Without a folder DIR is $XDG_CACHE_HOME/cohort, else
// ~/.cache/cohort. Throws InputError as TextPieces::encode() does; Error naming the file that
// cannot be written.
TokenStream load_tokens(const std::vector<TextSpan>& text, const Tokenizer& tokenizer,
                        std::optional<int32_t> document_end, const TokenCache& cache);

}  // namespace cohort
