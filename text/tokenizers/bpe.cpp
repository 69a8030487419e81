// Short words are merged by repeated search for the lowest rank, long ones with a heap.
#include "text/tokenizers/bpe.h"

#include <algorithm>
#include <array>
#include <queue>
#include <span>

#include "text/tokenizers/byte_level.h"
#include "text/tokenizers/json_fields.h"
#include "text/utf8.h"

namespace cohort {

namespace {

constexpr size_t kShortWord = 48;

// `merge[i]` merges ids[i] and ids[i + 1].
size_t merge_short(const PairMap<Merge>& table, int32_t* ids, size_t size) {
  std::array<Merge, kShortWord> merge;
  for (size_t i = 0; i + 1 < size; ++i) merge[i] = table.find(ids[i], ids[i + 1]);
  while (size > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < size; ++i)
      if (merge[i].rank < merge[best].rank) best = i;
    if (merge[best].rank == Merge::kNone) break;
    ids[best] = merge[best].id;
    --size;
    for (size_t i = best + 1; i < size; ++i) ids[i] = ids[i + 1];
    for (size_t i = best; i + 1 < size; ++i) merge[i] = merge[i + 1];
    if (best + 1 < size) merge[best] = table.find(ids[best], ids[best + 1]);
    if (best > 0) merge[best - 1] = table.find(ids[best - 1], ids[best]);
  }
  return size;
}

size_t merge_long(const PairMap<Merge>& table, std::span<int32_t> ids) {
  // Symbols form a linked list of indices; a removed one has the id -1. The heap holds rank and
  // index of every possible merge; outdated entries are skipped.
  const size_t size = ids.size();
  std::vector<uint32_t> next(size), previous(size);
  std::vector<Merge> merge(size);
  using Heap = std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<>>;
  std::vector<uint64_t> entries;
  const auto entry_of = [&](size_t i) { return uint64_t{merge[i].rank} << 32 | i; };
  for (size_t i = 0; i < size; ++i) {
    next[i] = static_cast<uint32_t>(i + 1);
    previous[i] = static_cast<uint32_t>(i - 1);
    if (i + 1 < size) merge[i] = table.find(ids[i], ids[i + 1]);
    if (merge[i].rank != Merge::kNone) entries.push_back(entry_of(i));
  }
  Heap heap(std::greater<>(), std::move(entries));
  const auto update = [&](size_t i) {
    merge[i] = next[i] < size ? table.find(ids[i], ids[next[i]]) : Merge();
    if (merge[i].rank != Merge::kNone) heap.push(entry_of(i));
  };
  while (!heap.empty()) {
    const uint64_t entry = heap.top();
    heap.pop();
    const auto at = static_cast<uint32_t>(entry);
    if (ids[at] < 0 || merge[at].rank != entry >> 32) continue;
    const uint32_t removed = next[at];
    ids[at] = merge[at].id;
    ids[removed] = -1;
    next[at] = next[removed];
    if (next[at] < size) previous[next[at]] = at;
    update(at);
    if (at > 0) update(previous[at]);
  }
  return static_cast<size_t>(std::remove(ids.begin(), ids.end(), -1) - ids.begin());
}

}  // namespace

void merge_all(const PairMap<Merge>& merges, std::vector<int32_t>& ids, size_t begin) {
  const std::span<int32_t> word = std::span(ids).subspan(begin);
  ids.resize(begin + (word.size() <= kShortWord ? merge_short(merges, word.data(), word.size())
                                                : merge_long(merges, word)));
}

bool has_lost_spaces(const Json& merge) {
  return merge.is_string() &&
         std::count(merge.as_string().begin(), merge.as_string().end(), ' ') > 1;
}

std::string with_no_break_spaces(std::string_view token) {
  return replaced(token, " ", "\xc2\xa0");
}

namespace {

struct Sides {
  std::string left, right;
};

// Concatenates the two sides, without the continuation prefix of the right one.
std::string concatenated(const Sides& sides, const std::string& prefix) {
  return sides.left +
         (sides.right.starts_with(prefix) ? sides.right.substr(prefix.size()) : sides.right);
}

// Reads the two sides of a merge, written as "a b" or as ["a", "b"].
Sides sides_of(const Json& merge, const Vocabulary& vocabulary) {
  if (merge.is_array()) {
    const Json::Array& sides = merge.as_array();
    if (sides.size() != 2) throw InputError(str("expected two sides, got ", sides.size()));
    return {sides[0].as_string(), sides[1].as_string()};
  }
  const std::string& text = merge.as_string();
  const size_t space = text.find(' ');
  if (space == text.npos)
    throw InputError(str("expected two sides with a space between, got ", excerpt(text)));
  if (!has_lost_spaces(merge)) return {text.substr(0, space), text.substr(space + 1)};
  constexpr size_t kMaxBytes = 1000;  // tries each space: quadratic
  for (size_t i = space; text.size() <= kMaxBytes && i != text.npos; i = text.find(' ', i + 1)) {
    const Sides sides{with_no_break_spaces(text.substr(0, i)),
                      with_no_break_spaces(text.substr(i + 1))};
    if (vocabulary.find(sides.left) >= 0 && vocabulary.find(sides.right) >= 0 &&
        vocabulary.find(concatenated(sides, "")) >= 0)
      return sides;
  }
  throw InputError(str("expected two sides with one space between, got ", excerpt(text)));
}

class Bpe final : public Model {
 public:
  Bpe(const Json& json, WordText words, Vocabulary& vocabulary)
      : vocabulary_(vocabulary),
        words_(words),
        prefix_(text_or(json, "continuing_subword_prefix", "")),
        suffix_(text_or(json, "end_of_word_suffix", "")),
        unk_token_(text_or(json, "unk_token", "")),
        fuses_unk_(flag(json, "fuse_unk", false)),
        byte_fallback_(flag(json, "byte_fallback", false)),
        ignores_merges_(flag(json, "ignore_merges", false)) {
    has_unk_ = !json.get_or_null("unk_token").is_null();
    unk_id_ = vocabulary.find(unk_token_);
    const Json& dropout = json.get_or_null("dropout");
    if (!dropout.is_null() && dropout.as_double() != 0)
      throw InputError("dropout is not supported; hint: set it to null");
    for (size_t i = 0; i < byte_ids_.size(); ++i) {
      const char byte = static_cast<char>(i);
      byte_ids_[i] = vocabulary.find(words == WordText::kBytes ? to_byte_characters({&byte, 1})
                                                               : byte_token(byte));
    }
    with_context("merges", [&] { read_merges(json.at("merges")); });
    if (words != WordText::kBytes || !ignores_merges_) return;
    for (const auto& [token, id] : vocabulary.ids())
      if (const auto bytes = from_byte_characters(token)) ids_by_bytes_.emplace(*bytes, id);
  }

  void encode(std::string_view word, std::vector<int32_t>& ids) const override {
    if (ignores_merges_) {
      const auto& whole_words = words_ == WordText::kBytes ? ids_by_bytes_ : vocabulary_.ids();
      const auto whole = whole_words.find(word);
      if (whole != whole_words.end()) return ids.push_back(whole->second);
    }
    const size_t begin = ids.size();
    if (words_ == WordText::kBytes)
      add_bytes(word, ids);
    else
      add_characters(word, ids);
    merge_all(merges_, ids, begin);
  }

  bool splits_before(std::string_view character) const override {
    // No token may contain the character after another one, so that no merge crosses the boundary;
    // and the character must be a token itself, so that no unknown token is pending across it.
    if (words_ == WordText::kBytes || ignores_merges_ || !prefix_.empty() || !suffix_.empty() ||
        vocabulary_.find(character) < 0)
      return false;
    for (const auto& [token, id] : vocabulary_.ids()) {
      size_t at = 0;
      while (token.compare(at, character.size(), character) == 0) at += character.size();
      if (token.find(character, at) != token.npos) return false;
    }
    return true;
  }

 private:
  void read_merges(const Json& json) {
    const Json::Array& list = json.as_array();
    merges_ = PairMap<Merge>(list.size());
    for (size_t i = 0; i < list.size(); ++i) {
      try {
        const Sides sides = sides_of(list[i], vocabulary_);
        const auto id_of = [&](std::string_view token) {
          const int32_t id = vocabulary_.find(token);
          if (id < 0) throw InputError(excerpt(token) + " is not in the vocabulary");
          return id;
        };
        const int32_t left = id_of(sides.left), right = id_of(sides.right);
        merges_.set(left, right, {static_cast<uint32_t>(i), id_of(concatenated(sides, prefix_))});
      } catch (const InputError& e) {
        throw InputError(str("merge ", i, ": ", e.what()));
      }
    }
  }

  int32_t unk_id() const {
    if (unk_id_ < 0)
      throw InputError(str("the unk_token ", excerpt(unk_token_), " is not in the vocabulary"));
    return unk_id_;
  }

  void add_bytes(std::string_view word, std::vector<int32_t>& ids) const {
    bool in_unk = false;
    for (const char c : word) {
      const int32_t id = byte_ids_[static_cast<uint8_t>(c)];
      if (id < 0 && has_unk_ && !(in_unk && fuses_unk_)) ids.push_back(unk_id());
      if (id >= 0) ids.push_back(id);
      in_unk = id < 0;
    }
  }

  void add_characters(std::string_view word, std::vector<int32_t>& ids) const {
    // The unknown token is appended at the next known character, even after bytes that precede it.
    int32_t pending_unk = -1;
    std::string affixed;
    for (size_t at = 0, end = 0; at < word.size(); at = end) {
      end = next_utf8_boundary(word, at + 1);
      std::string_view character = word.substr(at, end - at);
      if ((at > 0 && !prefix_.empty()) || (end == word.size() && !suffix_.empty())) {
        affixed.assign(at > 0 ? prefix_ : "").append(character);
        if (end == word.size()) affixed += suffix_;
        character = affixed;
      }
      if (const int32_t id = vocabulary_.find(character); id >= 0) {
        if (pending_unk >= 0) ids.push_back(pending_unk);
        pending_unk = -1;
        ids.push_back(id);
        continue;
      }
      const auto byte_id = [&](char c) { return byte_ids_[static_cast<uint8_t>(c)]; };
      if (byte_fallback_ &&
          std::ranges::all_of(character, [&](char c) { return byte_id(c) >= 0; })) {
        for (const char c : character) ids.push_back(byte_id(c));
        continue;
      }
      if (!has_unk_) continue;
      if (pending_unk >= 0 && !fuses_unk_) ids.push_back(pending_unk);
      pending_unk = unk_id();
    }
    if (pending_unk >= 0) ids.push_back(pending_unk);
  }

  const Vocabulary& vocabulary_;
  PairMap<Merge> merges_;
  std::array<int32_t, 256> byte_ids_;  // kBytes: ids of the bytes; else of <0x00>..<0xFF>; -1: none
  WordText words_;
  TextMap<int32_t> ids_by_bytes_;  // kBytes with ignore_merges
  std::string prefix_, suffix_, unk_token_;
  int32_t unk_id_ = -1;
  bool has_unk_ = false, fuses_unk_ = false, byte_fallback_ = false, ignores_merges_ = false;
};

}  // namespace

std::unique_ptr<Model> make_bpe(const Json& json, WordText words, Vocabulary& vocabulary) {
  return std::make_unique<Bpe>(json, words, vocabulary);
}

}  // namespace cohort
