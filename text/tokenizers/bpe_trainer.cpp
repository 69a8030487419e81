// Each pair stores its count and the words that contain it, so that a merge costs time proportional
// to those words, not to the text.
#include "text/tokenizers/bpe_trainer.h"

#include <algorithm>
#include <queue>
#include <set>

#include "text/tokenizers/byte_level.h"
#include "text/tokenizers/hugging_face.h"
#include "text/utf8.h"

namespace cohort {
namespace {

// Longer words are counted in parts, to bound the cost of a merge.
constexpr size_t kMaxWord = 128;
constexpr int64_t kMinCount = 2;

struct Pair {
  int32_t left, right;
  auto operator<=>(const Pair&) const = default;
};
struct PairHash {
  size_t operator()(Pair pair) const {
    const uint64_t key =
        uint64_t{static_cast<uint32_t>(pair.left)} << 32 | static_cast<uint32_t>(pair.right);
    return static_cast<size_t>((key * 0x9e3779b97f4a7c15u) >> 16);
  }
};

// Most frequent first, then lowest token ids: a total order, so that the result does not depend on
// the order of a hash table.
struct Candidate {
  int64_t count;
  Pair pair;
  bool operator<(const Candidate& other) const {
    return count != other.count ? count < other.count : pair > other.pair;
  }
};

struct Word {
  std::vector<int32_t> ids;
  int64_t count;
};

class Merger {
 public:
  explicit Merger(std::vector<Word> words) : words_(std::move(words)) {
    for (size_t i = 0; i < words_.size(); ++i) add_pairs(static_cast<uint32_t>(i), 1);
    for (const auto& [pair, info] : pairs_) queue_.push({info.count, pair});
    touched_.clear();
  }

  // Removes the most frequent pair from the queue; returns false if none is frequent enough.
  bool next(Pair& best) {
    while (!queue_.empty()) {
      const Candidate top = queue_.top();
      queue_.pop();
      const auto info = pairs_.find(top.pair);
      if (info == pairs_.end()) continue;
      if (info->second.count != top.count) {  // the entry is outdated
        if (info->second.count < top.count && info->second.count >= kMinCount)
          queue_.push({info->second.count, top.pair});
        continue;
      }
      if (top.count < kMinCount) return false;
      best = top.pair;
      return true;
    }
    return false;
  }

  void merge(Pair pair, int32_t id) {
    const std::vector<uint32_t> words = std::move(pairs_[pair].words);
    for (const uint32_t word : words) {
      std::vector<int32_t>& ids = words_[word].ids;
      const auto is_pair = [&](size_t i) {
        return ids[i] == pair.left && ids[i + 1] == pair.right;
      };
      size_t first = 0;
      while (first + 1 < ids.size() && !is_pair(first)) ++first;
      if (first + 1 >= ids.size()) continue;  // listed twice, and already merged
      add_pairs(word, -1);
      size_t out = first;
      for (size_t i = first; i < ids.size(); ++out) {
        const bool merges = i + 1 < ids.size() && is_pair(i);
        ids[out] = merges ? id : ids[i];
        i += merges ? 2 : 1;
      }
      ids.resize(out);
      add_pairs(word, 1);
    }
    pairs_.erase(pair);
    for (const Pair touched : touched_)
      if (const auto info = pairs_.find(touched); info != pairs_.end() && info->second.count > 0)
        queue_.push({info->second.count, touched});
    touched_.clear();
  }

 private:
  struct Info {
    int64_t count = 0;
    std::vector<uint32_t> words;  // indices of words that contain or contained it
  };

  void add_pairs(uint32_t index, int sign) {
    const Word& word = words_[index];
    for (size_t i = 0; i + 1 < word.ids.size(); ++i) {
      const Pair pair{word.ids[i], word.ids[i + 1]};
      Info& info = pairs_[pair];
      info.count += sign * word.count;
      if (sign < 0) continue;
      if (info.words.empty() || info.words.back() != index) info.words.push_back(index);
      touched_.push_back(pair);
    }
  }

  std::vector<Word> words_;
  std::unordered_map<Pair, Info, PairHash> pairs_;
  std::priority_queue<Candidate> queue_;
  std::vector<Pair> touched_;  // pairs whose counts may have grown in this merge
};

constexpr const char* kByteLevel =
    R"({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false})";

// The result of training.
struct Trained {
  std::vector<std::string> tokens;  // by id, in GPT-2's byte characters
  TextMap<int32_t> ids;
  Json merges = Json::Array{};

  // The id of a token, which is new unless another pair has made the same one.
  int32_t add(const std::string& token) {
    const auto [entry, is_new] = ids.emplace(token, static_cast<int32_t>(tokens.size()));
    if (is_new) tokens.push_back(token);
    return entry->second;
  }
};

NamedFiles to_files(Trained trained, const BpeTrainerOptions& options) {
  TokenizerParts parts{.pre_tokenizer = str(R"({"type": "Sequence", "pretokenizers": [
                           {"type": "Split", "pattern": {"Regex": )",
                                            Json(options.pattern).dump(), R"(},
                            "behavior": "Isolated", "invert": false}, )",
                                            kByteLevel, "]}"),
                       .decoder = kByteLevel,
                       .indent = 1};
  for (size_t i = 0; i < trained.tokens.size(); ++i)
    parts.vocabulary.emplace_back(trained.tokens[i], static_cast<int64_t>(i));
  auto id = static_cast<int64_t>(trained.tokens.size());
  for (const std::string& text : options.special) {
    // A special token may be the character of a single byte.
    const auto known = trained.ids.find(text);
    parts.special.emplace_back(text, known != trained.ids.end() ? known->second : id++);
  }
  parts.merges = std::move(trained.merges);
  return tokenizer_files(std::move(parts));
}

}  // namespace

BpeTrainer::BpeTrainer(BpeTrainerOptions options)
    : options_(std::move(options)), special_(options_.special) {
  COHORT_CHECK(find_splitter(options_.pattern) != nullptr, "[bpe_trainer] unknown pattern");
  constexpr int64_t kMaxVocabulary = 1 << 22;
  const int64_t min_size = 256 + static_cast<int64_t>(options_.special.size());
  if (options_.vocab_size < min_size || options_.vocab_size > kMaxVocabulary)
    throw InputError(str("the vocabulary must have ", min_size,
                         " (the bytes and the special tokens) ", "to ", kMaxVocabulary,
                         " tokens, got ", options_.vocab_size));
  std::set<std::string> seen;
  for (const std::string& text : options_.special) {
    if (text.empty() || !is_utf8(text))
      throw InputError("a special token must be UTF-8 text, and not empty");
    if (!seen.insert(text).second)
      throw InputError(str("the special token ", excerpt(text), " is given twice"));
  }
  if (options_.special.empty()) throw InputError("a special token is needed to end a text");
}

void BpeTrainer::add_text(std::string_view text) {
  if (const size_t valid = utf8_prefix(text); valid < text.size())
    throw InputError(
        str("byte ", valid, " is not part of UTF-8 text; hint: convert the text to UTF-8"));
  const Splitter end_of_word = find_splitter(options_.pattern);
  const auto add = [&](std::string_view part) {
    for (size_t at = 0, end = 0; at < part.size(); at = end) {
      end = end_of_word(part, at);
      add_word(part.substr(at, end - at));
    }
  };
  size_t from = 0;
  for (const Match& match : special_.find_all(text)) {
    add(text.substr(from, match.begin - from));
    from = match.end;
  }
  add(text.substr(from));
}

void BpeTrainer::add_word(std::string_view word) {
  for (; !word.empty(); word.remove_prefix(std::min(word.size(), kMaxWord))) {
    const std::string_view part = word.substr(0, kMaxWord);
    const auto known = counts_.find(part);
    if (known != counts_.end())
      ++known->second;
    else
      counts_.emplace(part, 1);
  }
}

NamedFiles BpeTrainer::train() const {
  COHORT_CHECK(counts_.size() < UINT32_MAX, "[bpe_trainer] too many different words");
  std::vector<Word> words;
  for (const auto& [text, count] : counts_) {
    Word word{{}, count};
    for (const char c : text) word.ids.push_back(static_cast<uint8_t>(c));
    if (word.ids.size() > 1) words.push_back(std::move(word));
  }
  Trained trained;
  for (int byte = 0; byte < 256; ++byte)
    trained.add(to_byte_characters(std::string(1, static_cast<char>(byte))));

  const size_t wanted = static_cast<size_t>(options_.vocab_size) - options_.special.size();
  const std::set<std::string> special(options_.special.begin(), options_.special.end());
  Merger merger(std::move(words));
  for (Pair pair{}; trained.tokens.size() < wanted && merger.next(pair);) {
    const std::string left = trained.tokens[static_cast<size_t>(pair.left)],
                      right = trained.tokens[static_cast<size_t>(pair.right)];
    if (special.contains(left + right)) continue;  // it has its own id
    trained.merges.push_back(Json::Array{left, right});
    merger.merge(pair, trained.add(left + right));
  }
  return to_files(std::move(trained), options_);
}

}  // namespace cohort
