// Tokens and their ids.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace cohort {

// A hash table by texts, which finds a std::string_view without a copy of it.
struct TextHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};
template <class Value>
using TextMap = std::unordered_map<std::string, Value, TextHash, std::equal_to<>>;

class Vocabulary {
 public:
  static constexpr int64_t kMaxIds = 1 << 24;  // an id takes memory, and a model a row
  // Has the tokens of `base` too, if given.
  explicit Vocabulary(const Vocabulary* base = nullptr) : base_(base) {}
  void reserve(size_t tokens) { ids_.reserve(tokens); }
  // Throws InputError for an id that is out of range or taken, and for a token that has another id.
  void add(std::string_view token, int64_t id);
  // -1 if there is no such token.
  int32_t find(std::string_view token) const {
    const auto found = ids_.find(token);
    return found != ids_.end() ? found->second : base_ ? base_->find(token) : -1;
  }
  // nullopt if no token has this id.
  std::optional<std::string_view> token(int32_t id) const {
    if (id >= 0 && id < std::ssize(tokens_))
      if (const std::string* token = tokens_[static_cast<size_t>(id)]) return *token;
    return base_ ? base_->token(id) : std::nullopt;
  }
  // One more than the largest id.
  int64_t size() const { return std::max(std::ssize(tokens_), base_ ? base_->size() : 0); }
  // Without those of the base.
  const TextMap<int32_t>& ids() const { return ids_; }

 private:
  const Vocabulary* base_;
  TextMap<int32_t> ids_;
  std::vector<const std::string*> tokens_;  // by id: the key in ids_, or nullptr
};

}  // namespace cohort
