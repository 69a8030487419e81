// BM25 (Robertson and Zaragoza 2009): a document d of |d| words has the score, summed over the
// distinct words t of the query that it contains f times,
//   idf(t) f (k1 + 1) / (f + k1 (1 - b + b |d| / mean length)),
// where idf(t) = ln(1 + (N - n + 0.5) / (n + 0.5)) for a word in n of N documents; the 1 keeps it
// positive.
#include "rl/environments/search.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "text/unicode.h"
#include "text/utf8.h"

namespace cohort {
namespace {

constexpr double kK1 = 1.2, kB = 0.75;

// Words of a text and how often they occur.
std::map<std::string, uint32_t> count_words(std::string_view text) {
  std::map<std::string, uint32_t> counts;
  std::string word;
  for (size_t at = 0; at <= text.size();) {
    const Utf8Char c = at < text.size() ? decode_utf8(text, at) : Utf8Char{};
    if (c.size > 0 && has_class(c.code, kLetter | kMark | kNumber)) {
      word += to_lower_case(c.code);
    } else if (!word.empty()) {
      ++counts[word];
      word.clear();
    }
    at += std::max<size_t>(c.size, 1);
  }
  return counts;
}

}  // namespace

TextSearch::TextSearch(const std::string& path, const std::string& field) {
  JsonlConfig config{.path = {path}, .prompt = "", .answer = "", .solution = "{" + field + "}"};
  config.held_out_fraction = 0;
  try {
    documents_ = load_jsonl(config).train;
  } catch (const InputError& e) {
    throw InputError(str("environment.corpus: ", e.what(),
                         "; hint: one JSON object per line, with its text in the field of "
                         "environment.corpus_field, ",
                         field));
  }
  for (int64_t i = 0; i < documents_->size(); ++i) {
    lengths_.push_back(0);
    for (const auto& [word, count] : count_words(documents_->get(i).solution)) {
      postings_[word].push_back({static_cast<uint32_t>(i), count});
      lengths_.back() += count;
    }
  }
  mean_length_ =
      std::accumulate(lengths_.begin(), lengths_.end(), 0.0) / static_cast<double>(lengths_.size());
}

std::vector<std::string> TextSearch::find(std::string_view query, int64_t count) const {
  std::unordered_map<uint32_t, double> scores;
  for (const auto& [word, ignored] : count_words(query)) {
    const auto found = postings_.find(word);
    if (found == postings_.end()) continue;
    const auto all = static_cast<double>(lengths_.size());
    const auto having = static_cast<double>(found->second.size());
    const double idf = std::log(1 + (all - having + 0.5) / (having + 0.5));
    for (const auto [document, occurrences] : found->second) {
      const double length = lengths_[document] / mean_length_, f = occurrences;
      scores[document] += idf * f * (kK1 + 1) / (f + kK1 * (1 - kB + kB * length));
    }
  }
  std::vector<std::pair<double, uint32_t>> ranked;  // negative scores, so that the best are first
  for (const auto& [document, score] : scores) ranked.emplace_back(-score, document);
  const auto end = ranked.begin() + std::min(count, std::ssize(ranked));
  std::partial_sort(ranked.begin(), end, ranked.end());
  std::vector<std::string> texts;
  for (auto it = ranked.begin(); it != end; ++it)
    texts.push_back(documents_->get(it->second).solution);
  return texts;
}

}  // namespace cohort
