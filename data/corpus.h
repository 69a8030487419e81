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

#include "data/tokenizer.h"

namespace cohort {

// The files that an entry of data.text or data.jsonl.path means: one, all in a folder and its
// sub-folders but hidden ones, or those that a pattern matches ("books/*.txt"); by name. Throws
// InputError if there is none.
std::vector<std::string> text_files(const std::string& path);

// Bytes [begin, end) of a file, not empty: a document or a part of one; of a .jsonl file whole
// lines, each with a document as its field `text`.
struct TextSpan {
  std::string file;
  int64_t begin = 0, end = 0;
};

// Which part of some files is for training. The last `held_out_fraction` of all bytes is held out,
// from a character or, in a .jsonl file, from a line on.
class TextCorpus {
 public:
  // `files`: not empty. Throws InputError: unreadable, without text, or too short to split.
  TextCorpus(const std::vector<std::string>& files, double held_out_fraction);
  const std::vector<TextSpan>& train() const { return train_; }
  const std::vector<TextSpan>& held_out() const { return held_out_; }
  // Whether something is to stand between documents: a single file of plain text goes on where it
  // is cut.
  bool has_ends() const { return has_ends_; }

 private:
  std::vector<TextSpan> train_, held_out_;
  bool has_ends_;
};

// The characters that occur in texts.
class CharacterSet {
 public:
  // Throws InputError naming the first byte that is not UTF-8.
  void add(std::string_view text);
  void add(const CharacterSet& other) { *found_ |= *other.found_; }
  // Each of them once.
  std::string text() const;

 private:
  using Found = std::bitset<0x110000>;
  std::unique_ptr<Found> found_ = std::make_unique<Found>();
};

// Text in pieces of about 256 KB, each of which can be encoded without the others.
class TextPieces {
 public:
  explicit TextPieces(std::vector<TextSpan> spans);
  int64_t size() const { return first_.back(); }
  int64_t bytes() const { return bytes_; }

  // The tokens of each of the pieces [begin, end), by all threads: together those of the documents
  // one after the other, each with `document_end` after it where that is given. A document is cut
  // only where its tokens are the same without the cut, as far as 512 bytes on both sides tell;
  // one of which 64 MB have no such place is cut there anyway. Throws InputError naming the file:
  // it cannot be read, a line is no object with a text, or text has no token.
  std::vector<std::vector<int32_t>> encode(int64_t begin, int64_t end, const Tokenizer& tokenizer,
                                           std::optional<int32_t> document_end) const;
  // Every character that occurs, once. Throws InputError naming the file, also for what is not
  // UTF-8.
  std::string characters() const;

 private:
  using UseText = std::function<void(std::string_view text, bool ends_document)>;
  void for_each_text(int64_t piece, const Tokenizer* tokenizer, const UseText& use) const;
  int64_t cut(const InputFile& file, const TextSpan& span, int64_t index,
              const Tokenizer* tokenizer) const;

  std::vector<TextSpan> spans_;
  std::vector<int64_t> first_;  // piece of each span, and the number of all
  int64_t bytes_ = 0;
};

}  // namespace cohort
