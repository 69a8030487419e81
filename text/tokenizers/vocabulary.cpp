#include "text/tokenizers/vocabulary.h"

#include "core/check.h"
#include "text/utf8.h"

namespace cohort {

void Vocabulary::add(std::string_view token, int64_t id) {
  constexpr size_t kMaxTokenBytes = 1 << 16;
  if (id < 0 || id >= kMaxIds)
    throw InputError(
        str("the token ", excerpt(token), " has the id ", id, ", expected 0 to ", kMaxIds - 1));
  if (token.size() > kMaxTokenBytes)
    throw InputError(str("the token ", excerpt(token), " has ", token.size(), " bytes, more than ",
                         kMaxTokenBytes));
  if (const auto other = this->token(static_cast<int32_t>(id)); other && *other != token)
    throw InputError(
        str("the id ", id, " is that of ", excerpt(*other), " and of ", excerpt(token)));
  if (const int32_t known = find(token); known >= 0 && known != id)
    throw InputError(str("the token ", excerpt(token), " has the ids ", known, " and ", id));
  if (id >= std::ssize(tokens_)) tokens_.resize(static_cast<size_t>(id) + 1);
  tokens_[static_cast<size_t>(id)] = &ids_.emplace(token, static_cast<int32_t>(id)).first->first;
}

}  // namespace cohort
