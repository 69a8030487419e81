#include "text/tokenizers/added_tokens.h"

#include <algorithm>

#include "text/tokenizers/json_fields.h"
#include "text/unicode.h"
#include "text/utf8.h"

namespace cohort {
namespace {

bool is_word(std::string_view text, size_t at) {
  return has_class(decode_utf8(text, at).code, kWordCharacter);
}

bool is_whole_word(std::string_view text, const Match& match) {
  return (match.begin == 0 || !is_word(text, last_utf8_begin(text, match.begin))) &&
         (match.end == text.size() || !is_word(text, match.end));
}

}  // namespace

AddedToken read_added_token(const Json& json, int64_t id) {
  AddedToken token;
  token.content = json.at("content").as_string();
  token.id = id;
  token.single_word = flag(json, "single_word", false);
  token.lstrip = flag(json, "lstrip", false);
  token.rstrip = flag(json, "rstrip", false);
  token.special = flag(json, "special", false);
  token.normalized = flag(json, "normalized", !token.special);
  return token;
}

AddedTokens::AddedTokens(std::vector<AddedToken> tokens, const Normalizer& normalizer)
    : tokens_(std::move(tokens)) {
  size_t bytes = 0;
  for (const AddedToken& token : tokens_) bytes += token.content.size();
  Work work(bytes);
  std::vector<std::string> raw(tokens_.size()), normalized(tokens_.size());
  for (size_t i = 0; i < tokens_.size(); ++i) {
    AddedToken& token = tokens_[i];
    token.is_space = strip_if(token.content, Side::kBoth, is_white_space).empty();
    if (token.normalized && normalizer) normalizer(token.content, work);
    (token.normalized ? normalized : raw)[i] = token.content;
    by_id_[token.id] = i;
  }
  raw_ = LeftmostLongest(raw);
  normalized_ = LeftmostLongest(normalized);
}

const AddedToken* AddedTokens::find(int64_t id) const {
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : &tokens_[found->second];
}

void AddedTokens::find_all(const LeftmostLongest& matcher, std::string_view text,
                           const ByteRanges& plain, const Sink& sink) const {
  LeftmostLongest::Filter is_allowed;
  if (!plain.empty())
    is_allowed = [&](const Match& match) {
      const auto range = first_range(plain, match.begin);
      return range == plain.end() || range->first >= match.end ||
             tokens_[static_cast<size_t>(match.text)].is_space;
    };
  size_t done = 0, space_checked = 0;  // rstrip has searched for white space up to space_checked
  for (const Match& match : matcher.find_all(text, is_allowed)) {
    const AddedToken& token = tokens_[static_cast<size_t>(match.text)];
    if (token.single_word && !is_whole_word(text, match)) continue;
    size_t begin = match.begin, end = match.end;
    if (token.lstrip) {
      const auto before = text.substr(done, std::max(begin, done) - done);
      begin = done + strip_if(before, Side::kRight, is_white_space).size();
    }
    if (token.rstrip) {
      const auto rest = text.substr(std::max(end, space_checked));
      end = space_checked = text.size() - strip_if(rest, Side::kLeft, is_white_space).size();
    }
    if (begin >= end) continue;  // the white space of the token before
    if (done < begin) sink(done, begin, nullptr);
    sink(begin, end, &token);
    done = end;
  }
  if (done < text.size()) sink(done, text.size(), nullptr);
}

}  // namespace cohort
