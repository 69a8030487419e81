// Reading vocabularies, and the models other than BPE: WordPiece, Unigram and WordLevel.
#include <algorithm>
#include <cmath>
#include <utility>

#include "text/tokenizers/bpe.h"
#include "text/tokenizers/byte_level.h"
#include "text/tokenizers/json_fields.h"
#include "text/tokenizers/matcher.h"
#include "text/utf8.h"

namespace cohort {
namespace {

void read_vocabulary(const Json& json, Vocabulary& vocabulary) {
  with_context("vocab", [&] {
    const Json::Object& object = json.at("vocab").as_object();
    vocabulary.reserve(object.size());
    const Json& merges = json.get_or_null("merges");
    const bool lost_spaces =
        merges.is_array() && std::ranges::any_of(merges.as_array(), has_lost_spaces);
    for (const auto& [token, id] : object)
      vocabulary.add(lost_spaces ? with_no_break_spaces(token) : token, id.as_int());
  });
}

// The token for unknown words. It may be missing from a vocabulary until an unknown word occurs.
class UnknownToken {
 public:
  UnknownToken(std::string token, const Vocabulary& vocabulary)
      : token_(std::move(token)), id_(vocabulary.find(token_)) {}
  int32_t id_for(std::string_view word) const {
    if (id_ < 0)
      throw InputError(str("the word ", excerpt(word), " needs the unk_token ", excerpt(token_),
                           ", which is not in the vocabulary"));
    return id_;
  }

 private:
  std::string token_;
  int32_t id_;
};

class WordLevel final : public Model {
 public:
  WordLevel(const Json& json, const Vocabulary& vocabulary)
      : vocabulary_(vocabulary), unk_(text_or(json, "unk_token", "<unk>"), vocabulary) {}
  void encode(std::string_view word, std::vector<int32_t>& ids) const override {
    const int32_t id = vocabulary_.find(word);
    ids.push_back(id >= 0 ? id : unk_.id_for(word));
  }

 private:
  const Vocabulary& vocabulary_;
  UnknownToken unk_;
};

// Greedy longest match: the longest token at the start of the word, then the longest continuation.
class WordPiece final : public Model {
 public:
  WordPiece(const Json& json, const Vocabulary& vocabulary)
      : vocabulary_(vocabulary),
        unk_(text_or(json, "unk_token", "[UNK]"), vocabulary),
        prefix_(text_or(json, "continuing_subword_prefix", "##")) {
    constexpr int64_t kLongest = 1000;  // the time is quadratic in the word
    const Json& longest = json.get_or_null("max_input_chars_per_word");
    if (!longest.is_null()) max_characters_ = longest.as_int();
    if (max_characters_ < 0 || max_characters_ > kLongest)
      throw InputError(
          str("max_input_chars_per_word must be 0 to ", kLongest, ", got ", max_characters_));
    for (const auto& [token, id] : vocabulary.ids())
      longest_token_ = std::max(longest_token_, token.size());
  }

  void encode(std::string_view word, std::vector<int32_t>& ids) const override {
    const size_t begin = ids.size();
    std::string token;
    size_t at =
        static_cast<int64_t>(count_characters(word)) <= max_characters_ ? 0 : word.size() + 1;
    while (at < word.size()) {
      size_t end = word.size();
      int32_t id = -1;
      for (; end > at; --end) {
        if (end < word.size() && continues_utf8(word[end])) continue;
        if (end - at > longest_token_) continue;
        token.assign(at > 0 ? prefix_ : "").append(word.substr(at, end - at));
        id = vocabulary_.find(token);
        if (id >= 0) break;
      }
      if (id < 0) break;
      ids.push_back(id);
      at = end;
    }
    if (at == word.size()) return;
    ids.resize(begin);
    ids.push_back(unk_.id_for(word));
  }
  std::string_view continuing_prefix() const override { return prefix_; }

 private:
  const Vocabulary& vocabulary_;
  UnknownToken unk_;
  std::string prefix_;
  int64_t max_characters_ = 100;
  size_t longest_token_ = 0;
};

// The most probable segmentation of a word into tokens (Kudo, 2018), by Viterbi's algorithm.
class Unigram final : public Model {
 public:
  Unigram(const Json& json, Vocabulary& vocabulary)
      : vocabulary_(vocabulary), byte_fallback_(flag(json, "byte_fallback", false)) {
    with_context("vocab", [&] { read_scores(json.at("vocab").as_array(), vocabulary); });
    const Json& unk = json.get_or_null("unk_id");
    if (!unk.is_null()) {
      const int64_t id = unk.as_int();
      if (id < 0 || id >= static_cast<int64_t>(tokens_.size()))
        throw InputError(str("unk_id ", id, " is outside the vocabulary"));
      unk_ = static_cast<int32_t>(id);
    }
    std::vector<std::string_view> texts;
    for (int32_t id = 0; id < vocabulary.size(); ++id) texts.push_back(*vocabulary.token(id));
    matcher_ = Matcher(texts);
  }

  void encode(std::string_view word, std::vector<int32_t>& ids) const override {
    // Backtracks from the end; adjacent unknown characters are merged.
    std::vector<std::pair<size_t, size_t>> parts;
    const std::vector<Node> nodes = best_paths(word);
    bool in_unk = false;
    for (size_t end = word.size(); end > 0; end = nodes[end].begin) {
      const bool is_unk = unk_ >= 0 && nodes[end].id == unk_;
      if (is_unk && in_unk)
        parts.back().first = nodes[end].begin;
      else
        parts.emplace_back(nodes[end].begin, end);
      in_unk = is_unk;
    }
    for (size_t i = parts.size(); i-- > 0;)
      add(word.substr(parts[i].first, parts[i].second - parts[i].first), ids);
  }

 private:
  struct Token {
    double score;
    size_t size;  // bytes
  };
  struct Node {
    double score = 0;
    size_t begin = SIZE_MAX;  // offset of the token that ends at the node; SIZE_MAX: no path yet
    int32_t id = 0;
  };

  void read_scores(const Json::Array& list, Vocabulary& vocabulary) {
    for (const Json& item : list) {
      const Json::Array& pair = item.as_array();
      if (pair.size() != 2 || !std::isfinite(pair[1].as_double()))
        throw InputError(str("entry ", tokens_.size(), ": expected a token and its score"));
      vocabulary.add(pair[0].as_string(), static_cast<int64_t>(tokens_.size()));
      const double score = pair[1].as_double();
      lowest_ = tokens_.empty() ? score : std::min(lowest_, score);
      tokens_.push_back({score, pair[0].as_string().size()});
    }
  }

  std::vector<Node> best_paths(std::string_view word) const {
    constexpr double kUnkPenalty = 10;
    std::vector<Node> nodes(word.size() + 1);
    nodes[0].begin = 0;
    uint32_t state = Matcher::kRoot;
    size_t character = 0;  // offset of the character that ends at `end`
    for (size_t end = 1; end <= word.size(); ++end) {
      state = matcher_.next(state, static_cast<uint8_t>(word[end - 1]));
      if (end < word.size() && continues_utf8(word[end])) continue;
      Node& node = nodes[end];
      const auto consider = [&](size_t begin, double score, int32_t id) {
        score += nodes[begin].score;
        if (node.begin == SIZE_MAX || score > node.score) node = {score, begin, id};
      };
      bool has_single = false;
      for (uint32_t s = matcher_.first(state); matcher_.text(s) != Matcher::kNone;
           s = matcher_.shorter(s)) {
        const int32_t id = matcher_.text(s);
        const auto& [score, size] = tokens_[static_cast<size_t>(id)];
        const size_t begin = end - size;
        consider(begin, score, id);
        has_single = has_single || begin == character;
      }
      if (!has_single) consider(character, lowest_ - kUnkPenalty, std::max(unk_, 0));
      character = end;
    }
    return nodes;
  }

  void add(std::string_view part, std::vector<int32_t>& ids) const {
    if (const int32_t id = vocabulary_.find(part); id >= 0) {
      ids.push_back(id);
      return;
    }
    const size_t begin = ids.size();
    for (size_t i = 0; byte_fallback_ && i < part.size(); ++i) {
      const int32_t id = vocabulary_.find(byte_token(part[i]));
      if (id < 0) break;
      ids.push_back(id);
    }
    if (ids.size() - begin == part.size()) return;
    ids.resize(begin);
    if (unk_ < 0)
      throw InputError(str("the text ", excerpt(part), " has no token, and there is no unk_id"));
    ids.push_back(unk_);
  }

  const Vocabulary& vocabulary_;
  std::vector<Token> tokens_;  // by id
  double lowest_ = 0;
  int32_t unk_ = -1;
  bool byte_fallback_;
  Matcher matcher_;
};

// Files of old versions have no type.
std::string type_of(const Json& json) {
  const Json& type = json.get_or_null("type");
  if (!type.is_null()) return type.as_string();
  if (json.find("merges") != nullptr) return "BPE";
  if (json.at("vocab").is_array()) return "Unigram";
  return json.find("max_input_chars_per_word") != nullptr ? "WordPiece" : "WordLevel";
}

}  // namespace

WordText preferred_word_text(const Json& json) {
  const bool plain = type_of(json) == "BPE" && !flag(json, "byte_fallback", false) &&
                     text_or(json, "continuing_subword_prefix", "").empty() &&
                     text_or(json, "end_of_word_suffix", "").empty();
  return plain ? WordText::kBytes : WordText::kCharacters;
}

std::unique_ptr<Model> make_model(const Json& json, WordText words, Vocabulary& vocabulary) {
  const std::string type = type_of(json);
  if (type == "Unigram") return std::make_unique<Unigram>(json, vocabulary);
  if (type != "BPE" && type != "WordPiece" && type != "WordLevel")
    throw InputError(str("unknown model '", type, "'; known: BPE, WordPiece, WordLevel, Unigram"));
  read_vocabulary(json, vocabulary);
  if (type == "BPE") return make_bpe(json, words, vocabulary);
  if (type == "WordPiece") return std::make_unique<WordPiece>(json, vocabulary);
  return std::make_unique<WordLevel>(json, vocabulary);
}

}  // namespace cohort
