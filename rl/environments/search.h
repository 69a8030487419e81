// Full-text search over the lines of a JSONL file, for the tool `search`.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/example.h"

namespace cohort {

// An inverted index. The texts stay in their file: memory holds the index, about as large as they
// are.
class TextSearch {
 public:
  // `path`: JSON lines with the text in `field`; a file, a folder or a pattern. Throws InputError
  // naming file and line: unreadable, malformed JSON, a missing field.
  TextSearch(const std::string& path, const std::string& field);

  // The at most `count` texts that have a word of the query, the best ones first, ranked by BM25
  // and then by their order in the file. Words are sequences of letters, marks and digits in lower
  // case. Throws InputError if the file has changed.
  std::vector<std::string> find(std::string_view query, int64_t count) const;

 private:
  struct Posting {
    uint32_t document, count;  // occurrences of the word
  };
  std::unique_ptr<ExampleSet> documents_;  // the text is the answer
  std::vector<uint32_t> lengths_;          // in words, per document
  double mean_length_ = 0;
  std::unordered_map<std::string, std::vector<Posting>> postings_;  // in order of documents
};

}  // namespace cohort
