// Text for next-token training: files that may be larger than memory, read and encoded in pieces.
#pragma once

#include <bitset>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer.h"

namespace cohort {

// Files named by an entry of data.text or data.jsonl.path, sorted by name: a single file, all files
// of a folder and its sub-folders except hidden ones, or the matches of a pattern ("books/*.txt").
// Throws InputError if there is none.
std::vector<std::string> text_files(const std::string& path);

// Bytes [begin, end) of a file, not empty: a document or a part of one; in a .jsonl file, whole
// lines with a document each in the field `text`.
struct TextSpan {
  std::string file;
  int64_t begin = 0, end = 0;
};

// Split of text files into training and held-out spans. The last `held_out_fraction` of all bytes
// is held out, starting at a character boundary or, in a .jsonl file, at a line.
class TextCorpus {
 public:
  // `files`: not empty. Throws InputError if they are unreadable, empty or too short to split.
  TextCorpus(const std::vector<std::string>& files, double held_out_fraction);
  const std::vector<TextSpan>& train() const { return train_; }
  const std::vector<TextSpan>& held_out() const { return held_out_; }
  // True if documents need an end token after them. False for a single plain text file, whose spans
  // continue one another.
  bool has_document_ends() const { return has_document_ends_; }

 private:
  std::vector<TextSpan> train_, held_out_;
  bool has_document_ends_;
};

// Set of the characters that occur in texts.
class CharacterSet {
 public:
  // Throws InputError naming the first byte that is not UTF-8.
  void add(std::string_view text);
  void add(const CharacterSet& other) { *found_ |= *other.found_; }
  // All characters of the set in code point order.
  std::string text() const;

 private:
  using Found = std::bitset<0x110000>;
  std::unique_ptr<Found> found_ = std::make_unique<Found>();
};

// Text in pieces of about 256 KB that can be encoded independently.
class TextPieces {
 public:
  explicit TextPieces(std::vector<TextSpan> spans);
  int64_t size() const { return first_pieces_.back(); }
  int64_t bytes() const { return bytes_; }

  // Tokens of each of the pieces [begin, end), encoded by all threads. Concatenated they are the
  // tokens of the documents in order, each followed by `document_end` if given. A document is split
  // only where the split does not change its tokens, judged by 512 bytes on both sides; after 64 MB
  // without such a boundary it is split anyway. Throws InputError naming the file if it cannot be
  // read, a line is not an object with a text, or text has no token.
  std::vector<std::vector<int32_t>> encode(int64_t begin, int64_t end, const Tokenizer& tokenizer,
                                           std::optional<int32_t> document_end) const;
  // All characters that occur, each once. Throws InputError naming the file if it cannot be read or
  // is not UTF-8.
  std::string characters() const;

 private:
  using UseText = std::function<void(std::string_view text, bool ends_document)>;
  void for_each_text(int64_t piece, const Tokenizer* tokenizer, const UseText& use) const;
  int64_t piece_begin(const InputFile& file, const TextSpan& span, int64_t index,
                      const Tokenizer* tokenizer) const;

  std::vector<TextSpan> spans_;
  std::vector<int64_t> first_pieces_;  // per span, followed by the number of pieces
  int64_t bytes_ = 0;
};

}  // namespace cohort
