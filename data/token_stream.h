// The tokens of a text: in memory, or in files that are made once and read on demand.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/corpus.h"
#include "sys/input_file.h"
#include "text/tokenizer.h"

namespace cohort {

class TokenStream {
 public:
  TokenStream() = default;
  explicit TokenStream(std::vector<int32_t> tokens);

  int64_t size() const { return size_; }
  // Tokens [begin, begin + count). Throws InputError if their file can no longer be read.
  std::vector<int32_t> read(int64_t begin, int64_t count) const;
  // Advises the system that these tokens will be read soon.
  void will_read(int64_t begin, int64_t count) const;
  // Appends the tokens of another stream.
  void append(TokenStream other);

 private:
  friend class TokenShards;
  struct Part {
    std::vector<int32_t> tokens;      // in memory, or
    std::unique_ptr<InputFile> file;  // 16- or 32-bit numbers after a header
    int64_t width = 0;                // bytes of a number
    int32_t vocab_size = 0;
    int64_t begin = 0, end = 0;  // in the stream
  };
  void add(Part part, int64_t count);
  std::vector<Part> parts_;
  int64_t size_ = 0;
};

// Location of the token files, and their dependencies besides the spans.
struct TokenCache {
  std::string dir;       // data.cache_dir; empty: a short text stays in memory, see kShortText
  std::string checksum;  // checksum of the text files
};
// Maximum bytes of text that stay in memory if no folder is named.
inline constexpr int64_t kShortText = 64 << 20;

// The tokens of `text`, each document followed by `document_end` if given. Those of a text that is
// not short are written by all threads to DIR/FINGERPRINT/NNNNN.tokens, one per 1 GB of text,
// unless they exist: if another process is writing them, this one waits; finished files of an
// interrupted one are kept; if the folder is removed meanwhile, they are written again. Complete
// files are read without a lock, so that the folder may be read-only. Without a folder DIR is
// $XDG_CACHE_HOME/cohort, else ~/.cache/cohort.
// Throws InputError as TextPieces::encode() does; Error naming the file that cannot be written.
TokenStream load_tokens(const std::vector<TextSpan>& text, const Tokenizer& tokenizer,
                        std::optional<int32_t> document_end, const TokenCache& cache);

}  // namespace cohort
