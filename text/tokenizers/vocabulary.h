// Tokens and their ids.
#pragma once

#include <optional>

#include "text/tokenizers/string_map.h"

namespace cohort {

class Vocabulary {
 public:
  void reserve(size_t tokens, size_t bytes) { ids_.reserve(tokens, bytes); }
  // Throws InputError for an id that is out of range or taken, and for a token that has another id.
  void add(std::string_view token, int64_t id);
  // -1 if there is no such token.
  int32_t find(std::string_view token) const { return ids_.find(token); }
  // nullopt if no token has this id.
  std::optional<std::string_view> token(int32_t id) const;
  // One more than the largest id.
  int64_t size() const { return static_cast<int64_t>(positions_.size()); }
  const StringMap& tokens() const { return ids_; }

 private:
  StringMap ids_;
  std::vector<int32_t> positions_;  // by id: the index in ids_, or -1
};

}  // namespace cohort
